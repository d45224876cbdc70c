"""Start and end of the processes of a run."""

import json
import os
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from solrl_trainer.ranks.lifeline import End, Lifeline, ToldToEndError, leave
from solrl_trainer.ranks.lines import connect
from solrl_trainer.ranks.place import Place

if TYPE_CHECKING:
    from solrl_trainer.ranks.collectives import DistributedWorld
    from solrl_trainer.world import World

_RENDEZVOUS = timedelta(minutes=10)


class Ranks:
    """The processes that run a command together; possibly only this one.

    Attributes:
        place: place of this process.
    """

    def __init__(self, place: Place, line: Lifeline | None = None, store: Any = None) -> None:
        self.place = place
        self._line = line
        self._store = store
        self._shared = 0
        self._world: DistributedWorld | None = None

    @property
    def first(self) -> bool:
        """Whether this process is rank 0, the only one that writes files and prints."""
        return self.place.first

    def share(self, text: str | None) -> str:
        """Broadcast rank 0's text; the others pass None and wait for it."""
        if self._line is None:
            assert text is not None
            return text
        self._shared += 1
        key = f"solrl/shared/{self._shared}"
        if text is not None:
            self._store.set(key, text)
        self._line.meet()
        return bytes(self._store.get(key)).decode()

    def world(self, device: str, patience: float) -> "World":
        """Collectives of the ranks.

        Args:
            device: the run's device setting.
            patience: the run's patience in seconds.

        Raises:
            ValueError: this rank has no such device.
        """
        from solrl_trainer.world import SoloWorld, pick_device

        if self._line is None:
            return SoloWorld()
        from solrl_trainer.ranks.collectives import DistributedWorld

        kind = pick_device(device, self.place).partition(":")[0]
        first = self.share(kind if self.first else None)
        if kind != first:
            raise ValueError(
                f"rank {self.place.rank} computes on {kind}, and rank 0 on {first}; expected the same: check this "
                "machine's GPU and its driver"
            )
        on_gpu = kind == "cuda"
        self._world = DistributedWorld(self.place, self._line, self._store, on_gpu=on_gpu, patience=patience)
        return self._world

    def close(self) -> None:
        """Wait for all ranks, then disconnect."""
        if self._line is not None:
            self._line.meet(last=True)
        if self._world is not None:
            self._world.close()

    def advise(self, text: str) -> None:
        """Append a text to the message if the ranks end early."""
        if self._line is not None:
            self._line.advice = text


ALONE = Ranks(Place())


@contextmanager
def joined(place: Place) -> Iterator[Ranks]:
    """The processes of a run, joined until all have left the block.

    If one raises an error, is stopped or dies within the block, all processes exit immediately with the same exit
    code, and one per machine prints the reason.
    """
    if place.size == 1:
        yield Ranks(place)
        return
    store = _rendezvous(place)
    key = "solrl/lifeline"
    line = Lifeline(place, connect(place, lambda text: store.set(key, text), lambda: bytes(store.get(key)).decode()))
    before = signal.signal(signal.SIGTERM, line.on_signal)
    ranks = Ranks(place, line, store)
    try:
        try:
            line.listen()
            yield ranks
            ranks.close()
        except BaseException as error:
            _leave(error, line)
    except ToldToEndError as error:  # another rank's end became known while this rank handled its own error
        _leave(error, line)
    signal.signal(signal.SIGTERM, before)


def _leave(error: BaseException, line: Lifeline) -> None:
    """Say why all end, and leave the process."""
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)
    end = _end_of(error, line)
    line.tell(end)
    _report(end)
    leave(end.code)


def _rendezvous(place: Place) -> Any:
    from torch.distributed.rendezvous import rendezvous

    try:
        store, _, _ = next(iter(rendezvous("env://", timeout=_RENDEZVOUS)))
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        raise RuntimeError(
            f"rank {place.rank} cannot meet the others at {place.address}:{place.port}: {first}"
        ) from error
    return store


def _end_of(error: BaseException, line: Lifeline) -> End:
    if isinstance(error, ToldToEndError):
        return line.end or line.declare("terminated")
    if isinstance(error, KeyboardInterrupt):
        return line.declare("interrupted")
    if os.environ.get("SOLRL_TRACEBACK") and line.end is None:
        traceback.print_exception(error)
    return line.declare("failed", str(error) or type(error).__name__)


def _report(end: End) -> None:
    """Write the reason for torchrun's report."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        known = {"message": str(end), "extraInfo": {"py_callstack": str(end), "timestamp": str(int(time.time()))}}
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": known}, file)
