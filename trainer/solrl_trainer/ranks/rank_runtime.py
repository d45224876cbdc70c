"""Process group of a run: its start, and its end together.

torchrun ends all ranks of a machine when one of them ends early. gloo or a missing heartbeat tells the other machines.
The store of the ranks holds the first reason, so each machine prints that alone.
"""

import os
import signal
import socket
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import psutil  # type: ignore[import-untyped]
from solrl_core.interrupts import leave
from solrl_proto.printable import error_text, printable

from solrl_trainer.ranks.heartbeat import Heartbeat
from solrl_trainer.ranks.rank_info import RankInfo

if TYPE_CHECKING:
    from solrl_trainer.ranks.collectives import DistributedWorld
    from solrl_trainer.ranks.communicator import Communicator

_RENDEZVOUS_TIMEOUT = timedelta(minutes=10)
_PAUSE = 0.1
"""Seconds between looks for a text of rank 0."""
_GRACE = 6.0
"""Seconds until torchrun has noticed that a rank has ended, and has ended all other ranks."""
_SILENCE = 5.0
"""Seconds of them without a heartbeat from a rank that has ended."""
_SIGNALS = {
    signal.SIGINT: "stopped by Ctrl-C",
    signal.SIGTERM: "stopped by SIGTERM, which torchrun sends when a rank has ended; its report below names that rank",
}


class RankRuntime:
    """Processes that run a command together; possibly only this one."""

    def __init__(self, rank_info: RankInfo, store: Any = None) -> None:
        self.rank_info = rank_info
        self._store = store
        self._broadcasts = 0
        self._world: DistributedWorld | None = None
        self._hint = ""
        self._failing = False
        self._heartbeat = Heartbeat(rank_info, store, self.fail) if store is not None else None

    @property
    def is_rank_zero(self) -> bool:
        """Whether this process is rank 0, the only one that writes files and prints."""
        return self.rank_info.is_rank_zero

    def broadcast_text(self, text: str | None) -> str:
        """Rank 0's text, on every rank; all other ranks pass None and wait for it, without a time limit."""
        if self._store is None:
            assert text is not None
            return text
        self._broadcasts += 1
        key = f"broadcast/{self._broadcasts}"
        if text is not None:
            self._store.set(key, text)
        while not self._store.check([key]):  # the store's own wait would hold up signals
            time.sleep(_PAUSE)
        return bytes(self._store.get(key)).decode()

    def world(self, device: str, patience: float) -> "Communicator":
        """Collectives of the ranks, by the run's `device` and `patience` in seconds; a ValueError without it."""
        from solrl_trainer.ranks.communicator import Communicator, pick_device

        if self._store is None:
            return Communicator()
        from solrl_trainer.ranks.collectives import DistributedWorld

        kind = pick_device(device, self.rank_info).partition(":")[0]
        first = self.broadcast_text(kind if self.is_rank_zero else None)
        if kind != first:
            raise ValueError(
                f"rank {self.rank_info.rank} computes on {kind}, and rank 0 on {first}; expected the same: check this "
                "machine's GPU and its driver"
            )
        on_gpu = kind == "cuda"
        self._world = DistributedWorld(self.rank_info, self._store, self.fail, on_gpu=on_gpu, patience=patience)
        return self._world

    def set_hint(self, text: str) -> None:
        """Append a text to the message about an early end."""
        self._hint = f"; {text}"

    def fail(self, error: Exception) -> NoReturn:
        """End this process, and so all ranks, because of the error that is being handled."""
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        assert self._heartbeat is not None
        lost = ""
        if isinstance(error, RuntimeError):
            # Perhaps only another rank has ended. If torchrun saw that, its signal comes before this sleep is over.
            time.sleep(_GRACE)
            lost = self._heartbeat.lost(_SILENCE)
        self._failing = True
        if os.environ.get("SOLRL_TRACEBACK"):
            traceback.print_exception(error)
        named = "" if self.is_rank_zero else f"rank {self.rank_info.rank}: "
        message = self._message(lost or named + (error_text(error) or type(error).__name__))
        if message:
            error.__cause__ = None  # torchrun reports the message alone
            get_error_handler().record_exception(error.with_traceback(None))
        else:
            time.sleep(_GRACE)  # so that torchrun reports the first error alone
        leave(message, 2)

    def handle_signal(self, number: int, _: object) -> None:
        """End this process because of a signal, unless it ends already."""
        if not self._failing:
            leave(self._message(_SIGNALS[signal.Signals(number)], shared=number == signal.SIGINT), 128 + number)

    def close(self) -> None:
        """Wait for all ranks, then disconnect."""
        if self._world is not None:
            self._world.close()
        if self._heartbeat is not None:
            self._heartbeat.close()

    def _message(self, reason: str, *, shared: bool = True) -> str:
        """The message about the end, with the first shared reason of any rank; empty if this machine has printed it."""
        prints = self.rank_info.local_rank == 0
        if self._heartbeat is not None and self._heartbeat.has_store:
            with suppress(RuntimeError):  # the machine of rank 0 is gone
                reason = self._store.compare_set("reason", "", reason if shared else "").decode() or reason
                first_of_node = self.rank_info.rank - self.rank_info.local_rank
                prints = self._store.add(f"printed/{first_of_node}", 1) == 1
        text = "\n".join(map(printable, reason.splitlines()))
        return f"solrl-train: {text}{self._hint}" if prints else ""


SINGLE_PROCESS = RankRuntime(RankInfo())


@contextmanager
def process_group(rank_info: RankInfo) -> Iterator[RankRuntime]:
    """Process group of a run, until all ranks have left the block.

    If a rank raises an error or is stopped within the block, all ranks exit immediately. One rank on each machine
    prints the reason.
    """
    if rank_info.size == 1:
        yield RankRuntime(rank_info)
        return
    processes = RankRuntime(rank_info, _rendezvous(rank_info))
    before = {number: signal.signal(number, processes.handle_signal) for number in _SIGNALS}
    try:
        yield processes
        processes.close()
    except Exception as error:
        processes.fail(error)
    for number, handler in before.items():
        signal.signal(number, handler)


def _rendezvous(rank_info: RankInfo) -> Any:
    """Store of the ranks, with keys of this attempt alone: torchrun keeps the store when it restarts ranks."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]
    from torch.distributed.rendezvous import rendezvous

    try:
        store, _, _ = next(iter(rendezvous("env://", timeout=_RENDEZVOUS_TIMEOUT)))
    except RuntimeError as error:
        address = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        first = str(error).splitlines()[0]
        raise RuntimeError(f"rank {rank_info.rank} cannot meet the other ranks at {address}: {first}") from error
    choose_interface(os.environ["MASTER_ADDR"])
    return PrefixStore(f"solrl/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable with the name of the interface that gloo uses."""


def choose_interface(address: str) -> None:
    """Have gloo use the interface towards an address of rank 0's machine, unless its variable names another.

    By default gloo uses the address of the machine's host name. On many machines that is loopback, where ranks of other
    machines cannot reach it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing
        except OSError:  # not an IPv4 address
            return
        local = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if not local.startswith("127.") and local in [address.address for address in addresses]:
            os.environ.setdefault(GLOO_INTERFACE, name)
