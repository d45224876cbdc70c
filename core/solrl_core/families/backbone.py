"""Prompt embeddings of a backbone, and their cache, bounded by bytes."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

Conditioning = dict[str, Tensor]
"""Prompt embeddings: named tensors whose first axis is the prompt."""
PROMPT_CACHE_BYTES = 256 * 2**20
"""Enough for 150 to 250 prompts of the large models, which is several iterations."""


def stack(conditionings: Sequence[Conditioning]) -> Conditioning:
    """Concatenate several conditionings along the prompt axis."""
    return {name: torch.cat([c[name] for c in conditionings]) for name in conditionings[0]}


class PromptCache:
    """A least-recently-used cache of prompt embeddings. Threads may share it; each prompt is encoded once.

    Attributes:
        least: number of newest embeddings that are kept even beyond the limit of bytes.
    """

    def __init__(self, limit: int = PROMPT_CACHE_BYTES) -> None:
        self.least = 0
        self._limit = limit
        self._size = 0
        self._entries: OrderedDict[Hashable, Conditioning] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, encode: Callable[[], Conditioning]) -> Conditioning:
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


def _bytes(entry: Conditioning) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in entry.values())
