"""Rewards that raise what is no Exception, or return what is no score."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch


def interrupted(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Raises what Ctrl-C raises."""
    raise KeyboardInterrupt


def exits(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Ends the program."""
    sys.exit(3)


def base(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Raises the base of all."""
    raise BaseException("of everything")


def closes(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Raises what ends a generator."""
    raise GeneratorExit


def complex_scores(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Returns numbers without an order."""
    return torch.ones(len(images), dtype=torch.complex64)


def escapes(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Fails with a text that would clear a terminal and change its title."""
    raise ValueError("\x1b[2J\x1b]0;owned\x07\u202e<b>[red]")
