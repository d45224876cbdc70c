"""Heartbeats of the ranks through their store, which tell which rank is gone.

A failed collective does not say which rank made it fail, and a machine without power closes no connection.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from solrl_trainer.ranks.rank_info import RankInfo

_LIMIT = 60.0
"""Seconds without a heartbeat until a rank, or the store, counts as gone."""
_PERIOD = 0.5
"""Seconds between heartbeats."""
_SILENT = "0"
"""Count of heartbeats of a rank that has not begun, or has ended as it should."""


class Heartbeat:
    """Heartbeats that this rank sends, and all that it hears, its own included.

    Each rank counts its heartbeats in the store. So a rank that does not hear itself has lost the store.
    """

    def __init__(self, rank_info: RankInfo, store: Any, fail: Callable[[Exception], object]) -> None:
        """Begin. `fail` is called in another thread with an error that names a rank that is gone."""
        self._rank = rank_info.rank
        self._keys = [f"heartbeats/{rank}" for rank in range(rank_info.size)]
        self._heard = [("", time.monotonic())] * rank_info.size
        self._store = store.clone()
        self._fail = fail
        self._closed = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="solrl-heartbeat", daemon=True)
        self._beats.start()
        threading.Thread(target=self._watch, name="solrl-watch", daemon=True).start()

    @property
    def has_store(self) -> bool:
        """Whether the store answers."""
        return self._rank not in self._silent(_LIMIT)

    def lost(self, seconds: float = _LIMIT) -> str:
        """Sentence about the ranks without a heartbeat in the last seconds; empty if there are none."""
        silent = self._silent(seconds)
        if self._rank in silent:
            return "lost the machine of rank 0, where the store of the ranks is"
        if not silent:
            return ""
        ranks = ("rank " if len(silent) == 1 else "ranks ") + ", ".join(map(str, silent))
        return f"lost {ranks} (killed, out of memory, or the machine is gone)"

    def close(self) -> None:
        """End, so that no rank takes this one for lost."""
        self._closed.set()
        self._beats.join(_LIMIT)

    def _silent(self, seconds: float) -> list[int]:
        latest = time.monotonic() - seconds
        return [rank for rank, (_, moment) in enumerate(self._heard) if moment < latest]

    def _beat(self) -> None:
        with suppress(RuntimeError):  # the store is gone, so this rank hears nothing more
            for key in self._keys:
                self._store.add(key, 0)
            while not self._closed.wait(_PERIOD):
                self._store.add(self._keys[self._rank], 1)
                for rank, count in enumerate(reply.decode() for reply in self._store.multi_get(self._keys)):
                    if count == _SILENT or count != self._heard[rank][0]:
                        self._heard[rank] = (count, time.monotonic())
            self._store.set(self._keys[self._rank], _SILENT)

    def _watch(self) -> None:
        while not self._closed.wait(_PERIOD):
            if lost := self.lost():
                self._fail(TimeoutError(lost))
