"""Process group of a run: its start, and its end together."""

import json
import os
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from solrl_trainer.ranks.connections import connect
from solrl_trainer.ranks.interface import choose_interface
from solrl_trainer.ranks.liveness import Liveness
from solrl_trainer.ranks.rank_info import RankInfo
from solrl_trainer.ranks.shutdown import Shutdown, ShutdownError

if TYPE_CHECKING:
    from solrl_trainer.ranks.collectives import DistributedWorld
    from solrl_trainer.ranks.communicator import Communicator

_RENDEZVOUS_TIMEOUT = timedelta(minutes=10)


class RankRuntime:
    """Processes that run a command together; possibly only this one.

    Attributes:
        rank_info: rank of this process.
    """

    def __init__(self, rank_info: RankInfo, liveness: Liveness | None = None, store: Any = None) -> None:
        self.rank_info = rank_info
        self._liveness = liveness
        self._store = store
        self._broadcasts = 0
        self._world: DistributedWorld | None = None

    @property
    def is_rank_zero(self) -> bool:
        """Whether this process is rank 0, the only one that writes files and prints."""
        return self.rank_info.is_rank_zero

    def broadcast_text(self, text: str | None) -> str:
        """Rank 0's text, on every rank; the others pass None and wait for it."""
        if self._liveness is None:
            assert text is not None
            return text
        self._broadcasts += 1
        key = f"broadcast/{self._broadcasts}"
        if text is not None:
            self._store.set(key, text)
        self._liveness.barrier()
        return bytes(self._store.get(key)).decode()

    def world(self, device: str, patience: float) -> "Communicator":
        """Collectives of the ranks.

        Args:
            device: the run's device setting.
            patience: the run's patience in seconds.

        Raises:
            ValueError: this rank has no such device.
        """
        from solrl_trainer.ranks.communicator import SingleProcess, pick_device

        if self._liveness is None:
            return SingleProcess()
        from solrl_trainer.ranks.collectives import DistributedWorld

        kind = pick_device(device, self.rank_info).partition(":")[0]
        first = self.broadcast_text(kind if self.is_rank_zero else None)
        if kind != first:
            raise ValueError(
                f"rank {self.rank_info.rank} computes on {kind}, and rank 0 on {first}; expected the same: check this "
                "machine's GPU and its driver"
            )
        on_gpu = kind == "cuda"
        self._world = DistributedWorld(self.rank_info, self._liveness, self._store, on_gpu=on_gpu, patience=patience)
        return self._world

    def set_hint(self, text: str) -> None:
        """Append a text to the message about an early shutdown."""
        if self._liveness is not None:
            self._liveness.hint = text

    def close(self) -> None:
        """Wait for all ranks, then disconnect."""
        if self._liveness is not None:
            self._liveness.barrier(last=True)
        if self._world is not None:
            self._world.close()


SINGLE_PROCESS = RankRuntime(RankInfo())


@contextmanager
def process_group(rank_info: RankInfo) -> Iterator[RankRuntime]:
    """Process group of a run, until all ranks have left the block.

    If a rank raises an error, is stopped or dies within the block, all ranks exit immediately with the same exit code,
    and one per node prints the reason.
    """
    if rank_info.size == 1:
        yield RankRuntime(rank_info)
        return
    store = _rendezvous(rank_info)
    connections, token = connect(rank_info, store)
    choose_interface(connections)
    liveness = Liveness(rank_info, connections)
    before = signal.signal(signal.SIGTERM, liveness.handle_sigterm)
    processes = RankRuntime(rank_info, liveness, _own_keys(store, token))
    try:
        try:
            liveness.start()
            yield processes
            processes.close()
        except BaseException as error:
            _exit(error, liveness)
    except ShutdownError as error:  # another rank's failure became known while this rank handled its own error
        _exit(error, liveness)
    signal.signal(signal.SIGTERM, before)


def _rendezvous(rank_info: RankInfo) -> Any:
    from torch.distributed.rendezvous import rendezvous

    try:
        store, _, _ = next(iter(rendezvous("env://", timeout=_RENDEZVOUS_TIMEOUT)))
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        raise RuntimeError(
            f"rank {rank_info.rank} cannot meet the others at {rank_info.address}:{rank_info.port}: {first}"
        ) from error
    return store


def _own_keys(store: Any, token: str) -> Any:
    """The store under a prefix of this attempt; torchrun keeps the store, and all its keys, when it restarts ranks."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    return PrefixStore(f"solrl/{token}", store)


def _exit(error: BaseException, liveness: Liveness) -> None:
    """Shut down all ranks because of an error, and exit."""
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)
    shutdown = _shut_down(error, liveness)
    if os.environ.get("SOLRL_TRACEBACK") and shutdown.kind == "failed" and isinstance(error, Exception):
        traceback.print_exception(error)
    _report(shutdown)
    liveness.exit(shutdown)


def _shut_down(error: BaseException, liveness: Liveness) -> Shutdown:
    if isinstance(error, ShutdownError):
        return liveness.shutdown or liveness.shut_down("terminated")
    if isinstance(error, KeyboardInterrupt):
        return liveness.shut_down("interrupted")
    return liveness.shut_down("failed", str(error) or type(error).__name__)


def _report(shutdown: Shutdown) -> None:
    """Write the reason for torchrun's report."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        text = str(shutdown)
        report = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": report}, file)
