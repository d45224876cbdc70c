"""Warning of prompts that are longer than a model or a reward reads."""

import logging
from collections.abc import Mapping, Sequence

from solrl_core.families import Backbone
from solrl_core.rewards import RewardSet
from solrl_proto.rollouts import PromptItem

from solrl_trainer.prompts.prompt_rewards import scored_prompts
from solrl_trainer.run_folder.figures import value_text

logger = logging.getLogger(__name__)

_SHOWN = 3
_SHOWN_CHARACTERS = 60


def warn_of_long_prompts(backbone: Backbone, prompts_by_kind: Mapping[str, Sequence[PromptItem]]) -> None:
    """Warn of the prompts of each kind whose end the model does not read."""
    for kind, prompts in prompts_by_kind.items():
        unread = backbone.truncated_tokens([prompt.text for prompt in prompts])
        _warn(kind, prompts, unread, backbone.name, "the same images")


def warn_of_unread_prompts(rewards: RewardSet, prompts_by_kind: Mapping[str, Sequence[PromptItem]]) -> None:
    """Warn of the prompts of each kind whose end a reward does not read, as far as rewards say so."""
    for name in rewards.names:
        for kind, prompts in prompts_by_kind.items():
            judged = scored_prompts(name, prompts)
            unread = rewards.unread_tokens(name, [prompt.text for prompt in judged])
            _warn(kind, judged, unread, f"reward {name!r}", "an image the same score")


def _warn(kind: str, prompts: Sequence[PromptItem], unread: Sequence[int], reader: str, outcome: str) -> None:
    """Warn of prompts with so many unread tokens each."""
    if cut := [(count, prompt.text) for count, prompt in zip(unread, prompts, strict=True) if count]:
        named = ((count, value_text(text, _SHOWN_CHARACTERS)) for count, text in cut[:_SHOWN])
        examples = "; ".join(f"{text!r} ({count} tokens)" for count, text in named)
        more = f"; and {len(cut) - _SHOWN} more" if len(cut) > _SHOWN else ""
        logger.warning(
            f"{len(cut)} of {len(prompts)} {kind} prompts are longer than {reader} reads; prompts that "
            f"differ only after that give {outcome}: {examples}{more}"
        )
