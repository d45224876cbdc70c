"""Build the images of the Dockerfiles with buildah, without a container engine, and start their programs."""

import argparse
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from proof import images
from proof.compose import load
from proof.demo import demo

ROOT = Path(__file__).parents[2]
BASE, WITH_TORCH = "localhost/proof/debian", "localhost/proof/debian-torch"


def main() -> None:
    parser = argparse.ArgumentParser(prog="prove-images", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="keep images and logs")
    parser.add_argument("--quick", action="store_true", help="build on no other base, and no images of deploy/rewards")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix="prove-images-")).resolve()
    try:
        _prove(images.Buildah(folder), arguments.quick)
    except (RuntimeError, OSError) as error:
        print(f"prove-images: {error}", file=sys.stderr)
        sys.exit(1)
    finally:
        if arguments.keep:
            print(f"images and logs: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _prove(buildah: images.Buildah, quick: bool) -> None:
    services = load(ROOT / "docker-compose.yml", {})["services"]
    given: dict[str, str] = services["rollout"]["build"]["args"]
    if not images.answers(f"{given['TORCH_INDEX']}/torch/"):
        print("the PyTorch index cannot be reached from here: using pip's configuration instead")
        given["TORCH_INDEX"] = ""
    images.debian(buildah, BASE)
    for name in ("rollout", "trainer"):
        _build(buildah, name, ROOT / f"Dockerfile.{name}", given | {"BASE": BASE})
    if quick:
        return
    demo(buildah, services)
    images.with_torch(buildah, WITH_TORCH, BASE, given["TORCH"])
    output = _build(buildah, "kept", ROOT / "Dockerfile.trainer", {"BASE": WITH_TORCH})
    line = next((line for line in output.splitlines() if line.startswith("PyTorch ")), "")
    if not line.endswith("from the base image") or " at /usr/local/lib" not in line:
        raise RuntimeError(f"the PyTorch of the base image was not kept: {line or output[-2000:]}")
    # As docs/deploy.md starts several ranks. The base's torchrun would run the system's Python, without solrl.
    ranks = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "solrl_trainer", "presets")
    buildah.start("localhost/proof/kept", *ranks, entrypoint=["python3"])
    for dockerfile in sorted(ROOT.glob("deploy/rewards/*/Dockerfile")):
        _build(buildah, dockerfile.parent.name, dockerfile, {"BASE": BASE})


def _build(buildah: images.Buildah, name: str, dockerfile: Path, arguments: dict[str, str]) -> str:
    print(f"{name} …", flush=True)
    image, log = f"localhost/proof/{name}", buildah.folder / f"{name}.log"
    buildah.build(image, dockerfile, ROOT, arguments, log)
    print(buildah.start(image, "--help").splitlines()[0])
    return log.read_text(errors="replace")


main()
