"""How many candidates at once a device's memory holds, found out by trying."""

import gc
from collections.abc import Callable
from typing import TypeVar

import torch
from solrl_core.generator import CHUNK

Part = TypeVar("Part")


class NoRoomError(Exception):
    """Memory ran out, and again for half of it: `at_once` candidates are too many."""

    def __init__(self, at_once: int) -> None:
        super().__init__(f"memory holds less than {at_once} candidates at once")
        self.at_once = at_once


class Room:
    """Memory for a kind of work on candidates.

    Attributes:
        most: candidates at once; half of what ran out of memory, once something did with nothing beside it.
        alone: whether what else takes memory is waited for first, since memory ran out beside it.
    """

    def __init__(self) -> None:
        self.most = CHUNK
        self.alone = False

    def run(
        self,
        work: Callable[[slice], Part],
        count: int,
        ran_out: Callable[[int, str, bool], None],
        settle: Callable[[], bool] = lambda: False,
    ) -> list[Part]:
        """Apply `work` to `count` rows, in slices of at most `most`; where memory runs out, once more in halves.

        Where it ran out beside something else, it is tried again when that has ended, before it is halved.

        Args:
            work: makes what it makes of some rows; the same of each, whichever others come with it.
            count: how many rows there are.
            ran_out: told whenever memory did: with how many candidates at once, what torch said, and whether half as
                many are made from then on.
            settle: waits for what else takes memory; whether there was anything.

        Raises:
            NoRoomError: memory ran out in halves, too.
        """
        if self.alone:
            settle()
        at_once = min(self.most, count)
        made = self._tried(work, count)
        if isinstance(made, str) and settle():
            self.alone = True
            ran_out(at_once, made, False)
            free_memory()
            made = self._tried(work, count)
        if isinstance(made, str):
            self.most = max(1, at_once // 2)
            ran_out(at_once, made, True)
            at_once = min(self.most, count)
            free_memory()
            made = self._tried(work, count)
        if isinstance(made, str):
            self.most = max(1, at_once // 2)
            ran_out(at_once, made, True)
            raise NoRoomError(at_once)
        return made

    def _tried(self, work: Callable[[slice], Part], count: int) -> list[Part] | str:
        """What came of it, or what torch said when memory ran out."""
        at_once = min(self.most, count)
        try:
            return [work(slice(start, min(start + at_once, count))) for start in range(0, count, at_once)]
        except torch.OutOfMemoryError as error:
            # Not the error: it holds the frames, and so the tensors, of what did not fit.
            return str(error)


def free_memory() -> None:
    """Give back what no tensor holds any more."""
    gc.collect()
    torch.cuda.empty_cache()  # nothing, where CUDA was never used
