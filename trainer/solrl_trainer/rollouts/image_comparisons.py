"""Pairs of explored and regenerated images of the same seeds, for the report and the service's page."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from solrl_proto.rollouts import PromptItem

from solrl_trainer.rollouts.exploration import IterationSamples

SHOWN_PROMPTS = 3
"""Most prompts of an iteration whose pairs are shown."""
SHOWN_EACH = 3
"""Most pairs shown of a prompt's best samples, and of its worst samples."""


@dataclass(frozen=True)
class ImageComparison:
    """A selected seed, with the rewards of its explored image and of its BF16 image."""

    prompt: str
    seed: int
    place: Literal["best", "worst"]
    proxy: float
    true: float


@dataclass(frozen=True)
class ImageComparisons:
    """Selected candidates with both of their images.

    Attributes:
        explored, regenerated: images `for_showing`, float32 in [0, 1], one of each for each pair.
        seconds: time that the exploring device spent on the explored images.
    """

    pairs: list[ImageComparison]
    explored: torch.Tensor
    regenerated: torch.Tensor
    seconds: float

    def best_and_worst(self, prompts: int) -> "ImageComparisons":
        """The best and the worst pair of each of the first `prompts` prompts."""
        # Each prompt has as many best pairs, which come first, as worst ones.
        size = 2 * next(i for i, pair in enumerate(self.pairs) if pair.place == "worst")
        firsts = range(0, len(self.pairs), size)[:prompts]
        chosen = [i for first in firsts for i in (first, first + size - 1)]
        return ImageComparisons([self.pairs[i] for i in chosen], self.explored[chosen], self.regenerated[chosen], 0.0)


ImagesOf = Callable[[Sequence[PromptItem], Sequence[Sequence[int]], int, int], tuple[torch.Tensor, float]]
"""(prompts, seeds of each, explored version, iteration) → images `for_showing` of these candidates, float32 in [0, 1],
in the order of the prompts, and the seconds that the exploring device spent on them."""


def compare_images(samples: IterationSamples, images_of: ImagesOf, *, prompts: int, per_end: int) -> ImageComparisons:
    """Pair the `per_end` best and worst samples of the first `prompts` groups with their explored images.

    A ProblemError says that a service refuses, has lost the adapter version, or cannot be reached.
    """
    groups = samples.groups[:prompts]
    per_end = min(per_end, samples.scores.shape[1] // 2)
    places = [*range(per_end), *range(-per_end, 0)]  # also of images of the best and worst alone
    explored, seconds = images_of(
        [group.prompt for group in groups],
        [[group.seeds[i] for i in places] for group in groups],
        samples.exploration.version,
        samples.exploration.iteration,
    )
    return ImageComparisons(
        pairs=[
            ImageComparison(
                prompt=group.prompt.text,
                seed=group.seeds[i],
                place="worst" if i < 0 else "best",
                proxy=group.scores[i],
                true=float(group.trained.scores[i]),
            )
            for group in groups
            for i in places
        ],
        explored=explored,
        regenerated=torch.cat([group.trained.images[places] for group in groups]),
        seconds=seconds,
    )
