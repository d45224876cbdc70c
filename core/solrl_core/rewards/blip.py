"""ImageReward's network in transformers: BLIP's image encoder, text encoder with cross-attention, and an MLP."""

from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from transformers import BlipConfig, BlipTextModel, BlipVisionModel
from transformers.models.blip.modeling_blip import BlipPreTrainedModel

MLP_WIDTHS = (1024, 128, 64, 16)
MEAN, STD = 0.16717362830052426, 1.0333394966054072


def mlp(width: int, hidden: tuple[int, ...]) -> nn.Sequential:
    """Linear layers `width` → each of `hidden` → 1, without activations between them, as ImageReward was trained."""
    widths = (width, *hidden, 1)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


class ImageRewardModel(BlipPreTrainedModel):  # type: ignore[misc]  # transformers is not followed by mypy
    """(pixels, tokens) → reward. `save_pretrained` and `from_pretrained` write and read config.json and weights.

    Args:
        config: BlipConfig with the extra fields `mlp_widths` (hidden widths), `reward_mean` and `reward_std`, which
            default to the published model's. `text_config.is_decoder` must be true to create the
            cross-attention. `vision_config.layer_norm_eps` must be 1e-6 for weights from BLIP.
    """

    def __init__(self, config: BlipConfig) -> None:
        super().__init__(config)
        self.vision = BlipVisionModel(config.vision_config)
        self.text = BlipTextModel(config.text_config, add_pooling_layer=False)
        self.mlp = mlp(config.text_config.hidden_size, tuple(getattr(config, "mlp_widths", MLP_WIDTHS)))
        self.mean: float = getattr(config, "reward_mean", MEAN)
        self.std: float = getattr(config, "reward_std", STD)
        self.post_init()

    def forward(self, pixel_values: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Any:
        """Rewards [N] float32 of N pairs of pixels [N, 3, S, S] and tokens with mask, each [N, L]."""
        image = self.vision(pixel_values=pixel_values).last_hidden_state
        text = self.text(input_ids=input_ids, attention_mask=attention_mask, encoder_hidden_states=image)
        reward = self.mlp(text.last_hidden_state[:, 0])[:, 0].float()
        return (reward - self.mean) / self.std
