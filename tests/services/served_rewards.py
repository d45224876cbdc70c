"""Rewards that a test's reward service computes by their names in this module; they record their batches."""

import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from solrl_client.cancellation import current
from solrl_core.errors import RewardUnavailableError
from solrl_core.rewards.reward import checks_prompts
from tests.services.faulty_rewards import once_tried

batches: list[int] = []
"""Sizes of the batches of `gated`, `greedy` and `away`, in order."""
kept: list[int] = []
"""For each of these batches, how many earlier ones are still in memory."""
ended: list[str] = []
"""Rewards that were cancelled."""
reached, opened = threading.Event(), threading.Event()
"""`gated` sets the first and waits for the second."""
ROOM = 2

_scored: list[weakref.ref[torch.Tensor]] = []


def reset() -> None:
    """Forget all batches and close the gate."""
    for record in (batches, kept, ended, _scored):
        record.clear()
    reached.clear()
    opened.clear()


def _record(images: torch.Tensor) -> None:
    batches.append(len(images))
    kept.append(sum(one() is not None for one in _scored))
    _scored.append(weakref.ref(images))


def brightness(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Mean of an image's pixels."""
    return images.mean((1, 2, 3))


@once_tried
def gated(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Numbers in the metadata, once the gate is open."""
    _record(images)
    reached.set()
    assert opened.wait(600)
    return torch.tensor([float(one["want"]) for one in metadata])


@once_tried
def greedy(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Mean of an image's pixels, for as many as there is room for."""
    _record(images)
    if len(images) > ROOM:
        raise torch.OutOfMemoryError(f"room for {ROOM}")
    return images.mean((1, 2, 3))


@once_tried
def away(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Asks a server that never answers."""
    _record(images)
    raise RewardUnavailableError("away", "gave no answer")


@once_tried
def patient(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Waits for another service, which does not answer."""
    _record(images)
    reached.set()
    assert current().wait(600), "its calls are not cancelled"
    ended.append("patient")
    raise RewardUnavailableError("patient", "was cancelled")


@once_tried
def stuck(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Mean of an image's pixels, once the gate is open; nothing else ends it."""
    _record(images)
    reached.set()
    opened.wait()
    return images.mean((1, 2, 3))


def _has_red(text: str, metadata: Mapping[str, Any]) -> None:
    if "red" not in text:
        raise ValueError("it has no 'red'")


@checks_prompts(_has_red)
def fussy(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Redness, of prompts that ask for it."""
    return images[:, 0].mean((1, 2))


@once_tried
def held(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Mean of an image's pixels, once the folder in the metadata has a file `open`."""
    while not all(Path(one["folder"], "open").exists() for one in metadata):
        time.sleep(0.01)
    return images.mean((1, 2, 3))
