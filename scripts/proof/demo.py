"""The profile `demo` of docker-compose.yml in the built images, with Debian's Redis in place of Redis' own image."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from proof.images import Buildah, answers

PORT, REDIS_PORT, PASSWORD = 8100, 16379, "proof"
ADDRESS = f"http://127.0.0.1:{PORT}"
PATIENCE = 600.0


def demo(buildah: Buildah, services: Mapping[str, Any]) -> None:
    """Start Redis, the service and the trainer as the compose file does, and print the end of the trainer's output.

    Raises:
        RuntimeError: the service was not ready, or the trainer failed; includes the end of the output.
    """
    secrets, outputs = buildah.folder / "secrets", buildah.folder / "outputs"
    for folder in (secrets, outputs):
        folder.mkdir(mode=0o777)
        folder.chmod(0o777)
    (secrets / "solrl_redis_url").write_text(f"redis://:{PASSWORD}@127.0.0.1:{REDIS_PORT}/0")
    (secrets / "hf_token").touch()
    rollout, trainer = services["rollout"], services["demo"]
    served = buildah.program(
        "localhost/proof/rollout",
        *rollout["command"],
        environment=rollout["environment"],
        volumes={secrets: "/run/secrets"},
    )
    words = [word.replace("http://rollout:8100", ADDRESS) for word in trainer["command"]]
    trained = buildah.program("localhost/proof/trainer", *words, volumes={outputs: "/outputs"})
    redis = ["redis-server", "--port", str(REDIS_PORT), "--requirepass", PASSWORD, "--save", ""]
    log = buildah.folder / "demo.log"
    print("demo …", flush=True)
    with _running(redis, log, buildah.folder), _running(served, log, buildah.folder):
        until = time.monotonic() + PATIENCE
        while not answers(f"{ADDRESS}/health/ready"):
            if time.monotonic() > until:
                raise RuntimeError(f"the service was not ready after {PATIENCE:.0f} s:\n{log.read_text()[-3000:]}")
            time.sleep(1)
        began = time.monotonic()
        done = subprocess.run(trained, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise RuntimeError(f"the demo ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    print(*done.stdout.splitlines()[-12:], f"{time.monotonic() - began:.0f} s", sep="\n")


@contextmanager
def _running(command: list[str], log: Path, folder: Path) -> Iterator[None]:
    """A program and its children, which end with the block."""
    with log.open("a") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()
