"""Programs as real processes that can be killed: services, trainers, ranks.

They are forked from a process that has already imported them, which makes starts cheap, and run the entry points of
their commands.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.ports import free_port

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        *("solrl_rollout.cli", "solrl_rollout.serve", "solrl_rollout.http.app"),
        *("solrl_trainer.commands.cli", "solrl_trainer.commands.run"),
        # Modules that are imported only when a model is loaded.
        *("diffusers.models.transformers", "diffusers.pipelines.sana.pipeline_sana", "solrl_minis.catalog"),
        *("transformers.models.clip.modeling_clip", "transformers.models.clip.image_processing_pil_clip"),
        *("transformers.models.clip.tokenization_clip", "matplotlib.pyplot"),
    ]
)


class Program:
    """A process that runs `target(*arguments)` with its output redirected to `log`."""

    def __init__(self, target: Any, arguments: Sequence[Any], log: Path) -> None:
        self.log = log
        # Daemonic, so that it does not outlive the trials.
        self._process = _CONTEXT.Process(target=_started, args=(target, tuple(arguments), str(log)), daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.alive:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def wait(self, timeout: float = 600) -> int:
        """Wait for the exit code; negative if a signal killed the process."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self.kill()
            raise TimeoutError(self.log.read_text(errors="replace")[-2000:])
        return self._process.exitcode


class RankPrograms(Program):
    """torchrun with ranks of one run on this machine that run `target(*arguments)`, with one thread each."""

    def __init__(self, size: int, target: Any, arguments: Sequence[Any], log: Path) -> None:
        self.size = size
        super().__init__(_as_ranks, (size, free_port(), target, *arguments), log)

    def send(self, rank: int, number: int) -> None:
        ranks = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()[-self.size :]
        os.kill(int(ranks[rank]), number)

    def stop(self) -> None:
        self.send_signal(signal.SIGTERM)
        self.wait()


def _started(target: Callable[..., None], arguments: Sequence[Any], log: str) -> None:
    """Run `target` with its output redirected to `log`."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    target(*arguments)


def command(main: Callable[[], object], argv: Sequence[str], folder: str, environment: Mapping[str, str]) -> None:
    """Run a command's entry point in this folder and environment; modules on PYTHONPATH can be imported."""
    import torch

    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", torch.get_num_threads())))
    sys.argv = list(argv)
    main()


def _as_ranks(size: int, port: int, target: Callable[..., None], *arguments: Any) -> None:
    """Run `target` as torchrun does on this machine, except that the ranks are forked."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have children
    config = LaunchConfig(
        **{"min_nodes": 1, "max_nodes": 1, "nproc_per_node": size, "run_id": "ranks", "max_restarts": 0},
        **{"start_method": "fork", "rdzv_backend": "static", "rdzv_configs": {"rank": 0}},
        rdzv_endpoint=f"127.0.0.1:{port}",
    )
    elastic_launch(config, _as_rank)(target, *arguments)


def _as_rank(target: Callable[..., None], *arguments: Any) -> None:
    import torch

    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # forked with torchrun's handler, which a started rank does not have
    torch.set_num_threads(1)
    target(*arguments)
