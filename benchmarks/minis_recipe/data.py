"""Training data: rendered scenes with captions."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch

from minis_recipe.scenes import Scenes, render, sample_scenes
from minis_recipe.world import Combination, differing_in_one, split


class World(Protocol):
    """What training data come from: contents, their captions and their images."""

    rng: np.random.Generator

    def draw(self, count: int) -> list[Any]:
        """Draw `count` contents."""

    def change(self, content: Any) -> Any:
        """Draw a content that a wrong caption is about."""

    def caption(self, content: Any) -> str:
        """Draw one of the content's wordings."""

    def images(self, contents: Any, device: str) -> torch.Tensor:
        """Render one image or clip per content."""


class ListedWorld:
    """Draws contents of a world that lists all, all kinds equally often, and variants with one attribute changed.

    A source of training contents never draws a held-out variant either.

    Args:
        seed: of all draws.
        held_out: whether held-out contents are drawn, which nothing in this project trains on.
        kinds: the held-out or the training contents, by kind.
        differing: content → those that differ in one attribute.
    """

    def __init__(
        self,
        seed: int,
        held_out: bool,
        kinds: Mapping[str, Sequence[Any]],
        differing: Callable[[Any], Sequence[Any]],
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self._groups = list(kinds.values())
        self._differing = cache(lambda content: [c for c in differing(content) if held_out or not c.held_out])

    def draw(self, count: int) -> list[Any]:
        """Draw `count` contents."""
        kinds = self.rng.integers(len(self._groups), size=count)
        picks = self.rng.random(count)
        return [self._groups[k][int(p * len(self._groups[k]))] for k, p in zip(kinds, picks, strict=True)]

    def change(self, content: Any) -> Any:
        """Draw a content that differs in one attribute."""
        options = self._differing(content)
        return options[int(self.rng.random() * len(options))]

    def caption(self, content: Any) -> str:
        """Draw one of the content's wordings."""
        texts: list[str] = content.phrasings()
        return texts[int(self.rng.random() * len(texts))]


class Source(ListedWorld):
    """Combinations of the shapes world, as images."""

    def __init__(self, seed: int, held_out: bool = False) -> None:
        super().__init__(seed, held_out, split(held_out), differing_in_one)

    def scenes(self, combinations: Sequence[Combination]) -> Scenes:
        """Place the objects of each combination."""
        return sample_scenes(combinations, self.rng)

    def images(self, contents: Sequence[Combination], device: str) -> torch.Tensor:
        """Render one image per combination, [N, 3, 64, 64] in [0, 1]."""
        return render(self.scenes(contents), int(self.rng.integers(2**31)), device)
