"""Command line of scripts/prove-images."""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from proof import images
from proof.compose import Service, services
from proof.stack import Stack, left_over

ROOT = Path(__file__).parents[2]
BASE = "localhost/proof/debian"
_ASK = """
redis-cli ping | cut -d ' ' -f 1
export REDISCLI_AUTH="$(cat /run/secrets/redis_password)"
redis-cli dbsize
redis-cli config get maxmemory-policy | tail -n 1
redis-cli config get appendonly | tail -n 1
"""
RESULTS = ("result.json", "report.html", "grid.png", "metrics.jsonl")


class Timing:
    """Durations of the stages, printed as they end."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        print(f"{name} …", flush=True)
        started = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - started
        print(f"{name}: {_minutes(self.seconds[name])}", flush=True)


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"


def main() -> None:
    parser = argparse.ArgumentParser(prog="prove-images", description=__doc__)
    parser.add_argument(
        "--workdir", type=Path, help="parent of the folder with images and logs; default: the temporary directory"
    )
    parser.add_argument("--keep", action="store_true", help="keep that folder")
    parser.add_argument("--storage-driver", default="", help="of buildah; default: overlay if supported, else vfs")
    parser.add_argument("--ready-within", type=float, default=300.0, help="seconds until a service must be healthy")
    parser.add_argument("--quick", action="store_true", help="build on no other base, and no images of deploy/rewards")
    parser.add_argument("--rewards-only", action="store_true", help="build the images of deploy/rewards alone")
    parser.add_argument("--build-only", action="store_true", help="build the images and stop")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if arguments.workdir is not None:
        arguments.workdir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="prove-images-", dir=arguments.workdir)).resolve()
    timing = Timing()
    try:
        _prove(folder, arguments, timing)
    except (RuntimeError, ValueError, OSError) as error:
        print(f"prove-images: {error}", file=sys.stderr)
        sys.exit(1)
    finally:
        if arguments.keep:
            print(f"images and logs: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    for name, spent in timing.seconds.items():
        print(f"{_minutes(spent):>12}  {name}")
    print(f"{_minutes(sum(timing.seconds.values())):>12}  total")


def _prove(folder: Path, arguments: argparse.Namespace, timing: Timing) -> None:
    buildah = images.Buildah(folder, arguments.storage_driver)
    print(f"buildah with {buildah.driver} and chroot", flush=True)
    with timing.stage("Debian base by debootstrap"):
        images.debian(buildah, BASE)
    if not arguments.rewards_only:
        _prove_demo(buildah, arguments, timing)
    if not arguments.quick:
        for dockerfile in sorted(ROOT.glob("deploy/rewards/*/Dockerfile")):
            name = dockerfile.parent.name
            with timing.stage(f"image of deploy/rewards/{name}, which imports its reward"):
                log = buildah.folder / f"{name}-build.log"
                buildah.build(f"localhost/proof/{name}", dockerfile, ROOT, {"BASE": BASE}, log)


def _prove_demo(buildah: images.Buildah, arguments: argparse.Namespace, timing: Timing) -> None:
    """Build the images of the profile demo and run it."""
    profile = services(ROOT / "docker-compose.yml", "demo", _variables())
    built = {service.name: f"localhost/proof/{service.name}" for service in profile}
    print(f"{len(profile)} services of plain up and profile demo", flush=True)
    for service in profile:
        with timing.stage(f"image of {service.name}: {service.dockerfile or 'substitute for ' + service.image}"):
            if service.dockerfile is None:
                images.redis(buildah, built[service.name], BASE)
            else:
                _build(buildah, built[service.name], service, service.build_arguments | {"BASE": BASE})
    if not arguments.quick:
        with timing.stage("Dockerfile.rollout on a base image with PyTorch and pip constraints"):
            _build_on_torch(buildah, next(one for one in profile if one.dockerfile == "Dockerfile.rollout"))
    if not arguments.build_only:
        _run(Stack(buildah, built, arguments.ready_within), profile, timing)


def _variables() -> dict[str, str]:
    """Environment for the variables in docker-compose.yml."""
    found = dict(os.environ)
    for service in services(ROOT / "docker-compose.yml", "demo", found):
        index = service.build_arguments.get("TORCH_INDEX")
        if index and not images.answers(f"{index}/torch/"):
            print("the PyTorch index cannot be reached from here: using pip's configuration instead")
            return found | {"TORCH_INDEX": ""}
    return found


def _build(buildah: images.Buildah, image: str, service: Service, arguments: dict[str, str]) -> str:
    assert service.dockerfile is not None
    log = buildah.folder / f"{image.rpartition('/')[2]}-build.log"
    buildah.build(image, ROOT / service.dockerfile, ROOT, arguments, log)
    return log.read_text(errors="replace")


def _build_on_torch(buildah: images.Buildah, service: Service) -> None:
    base, image = "localhost/proof/debian-torch", "localhost/proof/kept"
    images.with_torch(buildah, base, BASE, service.build_arguments["TORCH"])
    output = _build(buildah, image, service, {"BASE": base})
    line = next((line for line in output.splitlines() if line.startswith("PyTorch ")), "")
    if not line.endswith("from the base image") or " at /usr/local/lib" not in line:
        raise RuntimeError(f"the PyTorch of the base image was not kept: {line or output[-2000:]}")
    print(f"  {line}")


def _run(stack: Stack, profile: list[Service], timing: Timing) -> None:
    print("from docker-compose.yml: commands, environment, users, secrets, order, health checks, grace periods")
    left_out = sorted({key for service in profile for key in service.left_out})
    print(f"not tested: {', '.join(left_out)}; loopback replaces the network between containers", flush=True)
    stack.isolate([service.name for service in profile])
    for service in profile:
        if service.health is not None:
            with timing.stage(f"{service.name} until healthy"):
                running = stack.start(service)
                stack.wait_healthy(running)
                stack.require_unprivileged(running)
            continue
        with timing.stage(f"{service.name} until it ends"):
            running = stack.start(service)
            if running.process.wait():
                raise RuntimeError(f"{service.name} ended with {running.process.returncode}\n{running.tail}")
        _show(stack.folder_of("outputs") / "demo", running.tail)
        stack.running.remove(running)
    _check_redis(stack)
    with timing.stage("stop, in reverse order"):
        for running in reversed(list(stack.running)):
            print(f"  {running.service.name}: exit 0 {stack.stop(running):.1f} s after SIGTERM", flush=True)
        time.sleep(1)
        if remaining := left_over():
            raise RuntimeError("processes are still running:\n" + "\n".join(remaining))
        print("  no process is left")


def _check_redis(stack: Stack) -> None:
    """Check Redis' settings, and that it has adapters: a service without its URL would silently keep them in memory."""
    redis = next(one for one in stack.running if one.service.image.startswith("redis"))
    output = stack.inside(redis, ["sh", "-c", _ASK])
    refused, keys, policy, durable = output.split()[:4]
    if refused != "NOAUTH" or int(keys) < 1 or (policy, durable) != ("noeviction", "yes"):
        raise RuntimeError(
            f"Redis answered {output!r}; expected NOAUTH, at least one key, noeviction and appendonly yes"
        )
    print(f"  {redis.service.name}: {keys} keys, maxmemory-policy {policy}, appendonly {durable}, password required")


def _show(outputs: Path, log: str) -> None:
    missing = [name for name in RESULTS if not (outputs / name).is_file()]
    if missing:
        raise RuntimeError(f"the trainer did not write {', '.join(missing)}\n{log}")
    print(log)
    result = json.loads((outputs / "result.json").read_text())
    print(json.dumps({key: result[key] for key in ("iterations", "images", "spearman", "seconds")}))


main()
