"""`solrl-train demo`: a rollout service and a training on this machine, and their results."""

import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from solrl_client.connections import http_client
from solrl_core.registry import FolderRegistry

from solrl_trainer.records.folder import LOCK, locked
from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.presets import read_settings_file, resolve

PRESET = "mini-sana/sol_rl/clipscore"
_READY_SECONDS = 600.0
"""On a GPU a service compiles at its start."""


@contextmanager
def rollout_service(
    model: str,
    log: Path,
    rewards: Sequence[str] = ("clipscore",),
    flags: Sequence[str] = (),
) -> Iterator[str]:
    """Run `solrl-rollout serve` as a child process, with additional `flags`; yields its URL, stops it with SIGTERM.

    On Linux it also ends if the thread that started it is killed.

    Raises:
        RuntimeError: the service did not become ready, or did not stop cleanly; includes the end of its log.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    # setpriv is part of util-linux. A child that outlives its parent would keep its memory and port.
    bound = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
    command = [*bound, sys.executable, "-m", "solrl_rollout", "serve", "--model", model, "--port", str(port)]
    command += ["--rewards", *rewards, *flags]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        service = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            _wait_until_ready(url, service, log)
            yield url
        finally:
            service.send_signal(signal.SIGTERM)
            try:
                code: int | None = service.wait(60)
            except subprocess.TimeoutExpired:
                service.kill()
                service.wait()
                code = None
    if code != 0:
        raise RuntimeError(f"the rollout service ended with {code}; the end of {log}:\n{_tail(log)}")


def _wait_until_ready(url: str, service: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while time.monotonic() < deadline:
        if service.poll() is not None:
            raise RuntimeError(f"the rollout service exited during its start; the end of {log}:\n{_tail(log)}")
        try:
            with http_client(url, timeout=5) as client:
                if client.get("/health/ready").is_success:
                    return
        except httpx.TransportError:
            pass
        time.sleep(0.3)
    raise RuntimeError(f"the rollout service was not ready in {_READY_SECONDS:.0f} s; the end of {log}:\n{_tail(log)}")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])


def demo(output: Path, *, seed: int, overrides: Sequence[str]) -> None:
    """Start the service, train and stop; print the result.

    Args:
        output: folder of the run; an earlier demo there is deleted.
        seed: seed of the run.
        overrides: `key=value` settings, as for `run --set`.

    Raises:
        ConfigError: an override is invalid; nothing is deleted or started.
    """
    # Before anything is deleted or started.
    config = demo_config(overrides, {"output": output, "run": "demo", "seed": seed})
    console = Console(stderr=True, markup=False)
    with locked(output):
        _clear(output)
        console.print("starting the rollout service (mini-sana, NVFP4 emulated on this CPU)")
        with rollout_service("mini-sana", output / "service.log") as url:
            from solrl_trainer.commands.run import run
            from solrl_trainer.records.progress import show_result

            summary = run(config.model_copy(update={"rollout_url": url}))
    show_result(summary, output)


def _clear(folder: Path) -> None:
    """Delete the files of an earlier demo in a folder; the caller holds the folder's lock."""
    if (folder / "metrics.jsonl").is_file():
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != LOCK:
                path.unlink()


DEMO_SETTINGS = (
    "iterations=6",
    "explore.prompts=8",
    "explore.precision=nvfp4",
    "explore.lag=0",
    "optimizer.learning_rate=1.5e-3",
    "algorithm.kl_weight=0",
    "evaluate.fidelity_prompts=2",
)
"""Changes to the preset, so that the demo takes minutes, and explores in (emulated) NVFP4 like the paper. Without its
slight pull to the base model, an update needs no velocities of it. Without a lag, candidates come from the version that
they train. Rank fidelity of four groups would take as long as
an iteration."""


def plan_file() -> Path:
    """The exploration plan that ships with the demo's model, by benchmarks/demo_plan.py."""
    return Path(FolderRegistry("model", "solrl.models").locate("mini-sana")) / "plan.json"


def demo_config(overrides: Sequence[str] = (), arguments: Mapping[str, Any] | None = None) -> RunConfig:
    """Settings of the demo: its preset, the plan that ships with the model, `DEMO_SETTINGS` and `overrides`.

    Raises:
        ConfigError: an override is invalid.
    """
    plan = read_settings_file(plan_file())
    # The address is that of the service's own place, until it has one.
    own = {"rollout_url": "http://127.0.0.1:8100", **(arguments or {})}
    return resolve(PRESET, files={"plan.json": plan}, overrides=[*DEMO_SETTINGS, *overrides], arguments=own).config
