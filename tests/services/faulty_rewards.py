"""Third-party rewards with faults, loaded by the real service as `tests.services.faulty_rewards:<name>`."""

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from solrl_core.rewards.trial import GREY


def once_tried(reward: Callable[..., Any]) -> Callable[..., Any]:
    """A reward that passes the trial on two grey images, and does otherwise what it does."""

    @wraps(reward)
    def call(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Any:
        return images.mean((1, 2, 3)) if prompts[0] == GREY else reward(images, prompts, metadata)

    return call


def picky(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Needs metadata `want`."""
    return torch.tensor([float(one["want"]) for one in metadata])


def twice(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Double of `want`, or 0 if that is no number."""
    return torch.tensor([2 * one["want"] if isinstance(one["want"], float | int) else 0.0 for one in metadata])


def typo(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Fails on every image."""
    return images.maen((1, 2, 3))  # type: ignore[operator]


@once_tried
def few(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """One score too few."""
    return images.mean((1, 2, 3))[1:]


@once_tried
def leave(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Ends the program, as some packages do."""
    sys.exit("a package's own end")


class End(BaseException):
    """The end of a thread."""


@once_tried
def end(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Would end the thread that calls it."""
    raise End("not this thread")


@once_tried
def evil(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Fails with a text that would clear a terminal."""
    raise ValueError("\x1b[2J\nforged")


@once_tried
def interrupt(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Raises what Ctrl-C raises."""
    raise KeyboardInterrupt


@once_tried
def listed(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Any:
    """A list, where a tensor belongs."""
    return [0.0] * len(images)


@once_tried
def complex_numbers(
    images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
) -> torch.Tensor:
    """Scores that have no order."""
    return torch.ones(len(images), dtype=torch.complex64)


class Fatal:
    """Kills the thread that scores with it, once it has scored: a fault that is not in the call of a reward."""

    _scored = False

    @property
    def at(self) -> None:
        """No server's address."""
        if self._scored:
            self._scored = False
            raise End

    def __call__(
        self, images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> torch.Tensor:
        """Score images; the last that this thread does."""
        self._scored = prompts[0] != GREY
        return images.mean((1, 2, 3))


fatal = Fatal()


def stuck(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Says so and never returns, if the metadata says `stop`."""
    if any(one.get("stop") for one in metadata):
        print("a reward is stuck", flush=True)
        threading.Event().wait()
    return images.mean((1, 2, 3))
