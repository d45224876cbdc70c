"""A first call of rewards, before a model is loaded: two grey images, whose scores must be usable."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from solrl_core.errors import RewardError
from solrl_core.rewards.reward import RewardDefaults, RewardSet

logger = logging.getLogger(__name__)

GREY = "two grey images"
"""Prompt of the images, where there are no prompts yet."""
MODELS_SIDE = 1024
"""Side of the images, where a model's settings give none."""
_CODE_ERRORS = (NameError, AttributeError, ImportError, TypeError)
"""Errors that other images and prompts would hardly change."""
_FRAMES = 9

Prompts = Sequence[tuple[str, Mapping[str, Any]]]
"""Texts and metadata."""


def try_rewards(
    rewards: RewardSet,
    model: RewardDefaults,
    side: int = MODELS_SIDE,
    prompts_of: Callable[[str], Prompts] = lambda name: (),
) -> list[str]:
    """Score two grey images with each reward that no server computes.

    Args:
        rewards, model: loaded rewards, and the model whose device and size of images apply.
        side: side of the images, if the model's options have no size.
        prompts_of: reward → texts and metadata that it will judge by; the first two are used. None if they are not
            known yet: then a reward may fail, for it may need metadata or another size, but not by an error of its
            code or of CUDA, and what it returns must be usable.

    Returns:
        Names of the rewards whose scores can be used.

    Raises:
        RewardError: a reward fails, or its scores cannot be used.
        torch.OutOfMemoryError: the device is out of memory.
    """
    height, width = model.options.height or side, model.options.width or side
    ramp = torch.linspace(0.25, 0.75, width, device=model.device).expand(3, height, -1)
    images, usable = torch.stack([ramp, ramp.flip(-1)]), []
    for name in rewards.computed_here:
        examples = list(prompts_of(name))[:2]
        prompts = examples or [(GREY, {})]
        if rewards.first_fault(name, prompts):
            continue
        clips = rewards.takes_clips(name)
        inputs = images[:, None].expand(-1, _FRAMES, -1, -1, -1) if clips else images
        texts, metadata = zip(*(prompts * 2)[:2], strict=True)
        logger.debug("reward %r is tried on two grey images", name)
        try:
            rewards.score([name], inputs, texts, metadata)
        except RewardError as error:
            cause = error.__cause__
            if not examples and cause and not isinstance(cause, _CODE_ERRORS) and "CUDA error" not in error.fault:
                logger.warning("%s; it is used all the same, since it may demand another size or prompt", error)
                continue
            cure = "" if examples else "; if it needs metadata, mark it by checks_prompts (docs/extending/reward.md)"
            raise RewardError(name, f"cannot be used: tried on two grey images, it {error.fault}{cure}") from error
        usable.append(name)
    return usable
