"""Warning of prompts that are longer than a model reads."""

import logging
from collections.abc import Mapping, Sequence

from solrl_core.families import Backbone
from solrl_proto.rollouts import PromptItem

from solrl_trainer.records.figures import value_text

logger = logging.getLogger(__name__)

_SHOWN = 3
_SHOWN_CHARACTERS = 60


def warn_of_long_prompts(backbone: Backbone, prompts_by_kind: Mapping[str, Sequence[PromptItem]]) -> None:
    """Warn of the prompts of each kind whose end the model does not read."""
    for kind, prompts in prompts_by_kind.items():
        unread = backbone.truncated_tokens([prompt.text for prompt in prompts])
        cut = [(count, prompt.text) for count, prompt in zip(unread, prompts, strict=True) if count]
        if cut:
            named = ((count, value_text(text, _SHOWN_CHARACTERS)) for count, text in cut[:_SHOWN])
            shown = "; ".join(f"{text!r} ({count} tokens)" for count, text in named)
            more = f"; and {len(cut) - _SHOWN} more" if len(cut) > _SHOWN else ""
            logger.warning(
                f"{len(cut)} of {len(prompts)} {kind} prompts are longer than {backbone.name} reads; prompts that "
                f"differ only after that give the same images: {shown}{more}"
            )
