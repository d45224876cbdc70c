"""A first call of rewards, before a model is loaded: two grey images, whose scores must be usable."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from solrl_core.errors import RewardError
from solrl_core.rewards.reward import RewardDefaults, RewardSet

logger = logging.getLogger(__name__)

GREY = "two grey images"
"""Prompt of the images, where there are no prompts yet."""
MODELS_SIDE = 1024
"""Side of the images, where a model's settings give none."""
_SIDE = 256
_OF_CODE = (NameError, AttributeError, ImportError, TypeError)
"""Errors that other images and prompts would hardly change."""
_FRAMES = 9

Prompts = Sequence[tuple[str, Mapping[str, Any]]]
"""Texts and metadata."""


class UnknownMetadata(dict[str, Any]):
    """Metadata of a prompt that does not exist yet: empty, and notes in `read` that it was read."""

    read = False

    def __deepcopy__(self, memo: object) -> "UnknownMetadata":
        return self  # so that the original notes it

    def __getitem__(self, name: str) -> Any:
        self.read = True
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.read = True
        return False

    def get(self, name: str, default: Any = None) -> Any:
        self.read = True
        return default

    def __iter__(self) -> Iterator[str]:
        self.read = True
        return super().__iter__()

    def __len__(self) -> int:
        self.read = True
        return 0


def try_rewards(
    rewards: RewardSet,
    model: RewardDefaults,
    side: int | None = MODELS_SIDE,
    prompts_of: Callable[[str], Prompts] = lambda name: (),
) -> list[str]:
    """Score two grey images with each reward that no server computes.

    Args:
        rewards, model: loaded rewards, and the model whose device and size of images apply.
        side: side of the images, if the model's options have no size; None if unknown. Then a reward may fail, but
            not by an error of its code, and what it returns must be usable.
        prompts_of: reward → texts and metadata that it will judge by; the first two are used. None if they are not
            known yet: then a reward that reads metadata, or refuses a prompt without, may fail.

    Returns:
        Names of the rewards whose scores can be used.

    Raises:
        RewardError: a reward fails, or its scores cannot be used.
        torch.OutOfMemoryError: the device is out of memory.
    """
    height, width = model.options.height or side, model.options.width or side
    ramp = torch.linspace(0.25, 0.75, width or _SIDE, device=model.device).expand(3, height or _SIDE, -1)
    images, usable = torch.stack([ramp, ramp.flip(-1)]), []
    for name in rewards.computed_here:
        unknown = UnknownMetadata()
        prompts = list(prompts_of(name))[:2] or [(GREY, unknown)]
        if rewards.first_fault(name, prompts):
            continue
        clips = rewards.takes_clips(name)
        inputs = images[:, None].expand(-1, _FRAMES, -1, -1, -1) if clips else images
        texts, metadata = zip(*(prompts * 2)[:2], strict=True)
        logger.debug("reward %r is tried on two grey images", name)
        try:
            rewards.score([name], inputs, texts, metadata)
        except RewardError as error:
            if unknown.read:
                logger.debug("reward %r reads metadata, and cannot be tried without: %s", name, error)
                continue
            if not (height and width) and error.__cause__ and not isinstance(error.__cause__, _OF_CODE):
                logger.warning("%s; it is used all the same, since it may demand another size or prompt", error)
                continue
            raise RewardError(name, f"cannot be used: tried on two grey images, it {error.fault}") from error
        usable.append(name)
    return usable
