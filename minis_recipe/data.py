"""Training data: rendered scenes with captions."""

from collections.abc import Sequence

import numpy as np
import torch

from minis_recipe.scenes import Scenes, render, sample_scenes
from minis_recipe.world import KINDS, Combination, differing_in_one, split


class Source:
    """Draws combinations, all kinds equally often, and variants of them with one attribute changed.

    A source of training combinations never draws a held-out variant either.
    """

    def __init__(self, seed: int, held_out: bool = False) -> None:
        self.rng = np.random.default_rng(seed)
        self._kinds = split(held_out)
        self._changes: dict[Combination, list[Combination]] = {}
        self._held_out = held_out

    def draw(self, count: int) -> list[Combination]:
        """Draw `count` combinations."""
        kinds = self.rng.integers(len(KINDS), size=count)
        picks = self.rng.random(count)
        groups = [self._kinds[kind] for kind in KINDS]
        return [groups[k][int(p * len(groups[k]))] for k, p in zip(kinds, picks, strict=True)]

    def change(self, combination: Combination) -> Combination:
        """Draw a combination that differs in one attribute."""
        if combination not in self._changes:
            self._changes[combination] = [c for c in differing_in_one(combination) if self._held_out or not c.held_out]
        options = self._changes[combination]
        return options[int(self.rng.random() * len(options))]

    def caption(self, combination: Combination) -> str:
        """Draw one of the combination's wordings."""
        texts = combination.phrasings()
        return texts[int(self.rng.random() * len(texts))]

    def scenes(self, combinations: Sequence[Combination]) -> Scenes:
        """Place the objects of each combination."""
        return sample_scenes(combinations, self.rng)

    def images(self, combinations: Sequence[Combination], device: str) -> torch.Tensor:
        """Render one image per combination, [N, 3, 64, 64] in [0, 1]."""
        return render(self.scenes(combinations), int(self.rng.integers(2**31)), device)
