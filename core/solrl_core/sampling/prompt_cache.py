"""Cache of prompt embeddings, bounded by bytes."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch

PROMPT_CACHE_BYTES = 256 * 2**20
"""Enough for 150 to 250 prompts of the large models, which is several iterations."""


class PromptCache:
    """A least-recently-used cache of prompt embeddings. Threads may share it; each prompt is encoded once.

    Attributes:
        least: number of newest embeddings that are kept even beyond the limit of bytes.
    """

    def __init__(self, limit: int = PROMPT_CACHE_BYTES) -> None:
        self.least = 0
        self._limit = limit
        self._size = 0
        self._entries: OrderedDict[Hashable, dict[str, torch.Tensor]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, encode: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return the embedding of `key`, calling `encode` on a miss. One larger than the limit is not kept."""
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return self._entries[key]
            # Never inference tensors, regardless of the caller's mode: training uses the embeddings, too.
            with torch.inference_mode(False), torch.no_grad():
                entry = self._entries[key] = encode()
            self._size += _bytes(entry)
            while self._size > self._limit and len(self._entries) > self.least:
                self._size -= _bytes(self._entries.popitem(last=False)[1])
            return entry


def _bytes(entry: dict[str, torch.Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in entry.values())
