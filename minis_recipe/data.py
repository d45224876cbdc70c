"""Training data: rendered scenes with captions."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
import torch

from minis_recipe.scenes import Scenes, render, sample_scenes
from minis_recipe.world import KINDS, Combination, differing_in_one, split


class Content(Protocol):
    """Content of a prompt, independent of its wording."""

    @property
    def held_out(self) -> bool:
        """Whether nothing in this project trains on it."""

    def phrasings(self) -> list[str]:
        """All of its wordings."""


ContentT = TypeVar("ContentT", bound=Content)


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


class AnySource(ABC, Generic[ContentT]):
    """Draws contents of prompts, all kinds equally often, and variants of them with one attribute changed.

    A source of training contents never draws a held-out variant either.

    Attributes:
        kinds: kinds of contents.
    """

    kinds: ClassVar[Sequence[str]]

    def __init__(self, seed: int, held_out: bool = False) -> None:
        self.rng = np.random.default_rng(seed)
        self._kinds = self._split(held_out)
        self._changes: dict[ContentT, list[ContentT]] = {}
        self._held_out = held_out

    @abstractmethod
    def _split(self, held_out: bool) -> dict[str, list[ContentT]]:
        """Held-out or training contents, by kind."""

    @abstractmethod
    def _differing(self, content: ContentT) -> list[ContentT]:
        """Contents that differ in one attribute."""

    @abstractmethod
    def images(self, contents: Sequence[ContentT], device: str) -> torch.Tensor:
        """Render one image or clip per content, [N, …, 3, 64, 64] in [0, 1]."""

    def draw(self, count: int) -> list[ContentT]:
        """Draw `count` contents."""
        kinds = self.rng.integers(len(self.kinds), size=count)
        picks = self.rng.random(count)
        groups = [self._kinds[kind] for kind in self.kinds]
        return [groups[k][int(p * len(groups[k]))] for k, p in zip(kinds, picks, strict=True)]

    def change(self, content: ContentT) -> ContentT:
        """Draw a content that differs in one attribute."""
        if content not in self._changes:
            self._changes[content] = [c for c in self._differing(content) if self._held_out or not c.held_out]
        options = self._changes[content]
        return options[int(self.rng.random() * len(options))]

    def caption(self, content: ContentT) -> str:
        """Draw one of the content's wordings."""
        texts = content.phrasings()
        return texts[int(self.rng.random() * len(texts))]


class Source(AnySource[Combination]):
    """Combinations of the shapes world, as images."""

    kinds = KINDS

    def _split(self, held_out: bool) -> dict[str, list[Combination]]:
        return split(held_out)

    def _differing(self, content: Combination) -> list[Combination]:
        return differing_in_one(content)

    def scenes(self, combinations: Sequence[Combination]) -> Scenes:
        """Place the objects of each combination."""
        return sample_scenes(combinations, self.rng)

    def images(self, contents: Sequence[Combination], device: str) -> torch.Tensor:
        """Render one image per combination, [N, 3, 64, 64] in [0, 1]."""
        return render(self.scenes(contents), int(self.rng.integers(2**31)), device)
