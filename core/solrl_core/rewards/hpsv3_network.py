"""HPSv3's network in transformers: Qwen2-VL without its language head, and a head that reads one token's state."""

from typing import Any

from torch import Tensor, nn
from transformers import Qwen2VLConfig, Qwen2VLModel, Qwen2VLPreTrainedModel

HEAD_WIDTHS = (1024, 16)
OUTPUTS = 2
"""Mean and deviation of the score's distribution."""


class HpsV3Model(Qwen2VLPreTrainedModel):  # type: ignore[misc]  # transformers is not followed by mypy
    """(tokens, pixels) → scores. The head computes in float32, whatever the dtype of the rest."""

    _keep_in_fp32_modules_strict = ("rm_head",)

    def __init__(self, config: Qwen2VLConfig) -> None:
        super().__init__(config)
        self.model = Qwen2VLModel(config)
        first, second = HEAD_WIDTHS
        self.rm_head = nn.Sequential(
            nn.Linear(config.text_config.hidden_size, first),
            nn.ReLU(),
            nn.Dropout(0.05),
            nn.Linear(first, second),
            nn.ReLU(),
            nn.Linear(second, OUTPUTS),
        )
        self.post_init()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, pixel_values: Tensor, image_grid_thw: Tensor, reward_token: int
    ) -> Any:
        """Scores [N] float32 of N pairs.

        Args:
            input_ids, attention_mask: tokens of the questions with their mask, each [N, L], padded on the right. Each
                question has one `reward_token`, and one image token for each merged patch of its image.
            pixel_values: patches of all images, [P, 3 · 2 · 14 · 14].
            image_grid_thw: frames, rows and columns of patches of each image, [N, 3].
            reward_token: the token whose state the head reads.
        """
        embeddings = self.model.get_input_embeddings()(input_ids)
        visual = self.model.visual
        image = visual(pixel_values.to(visual.dtype), grid_thw=image_grid_thw).pooler_output
        places = (input_ids == self.config.image_token_id)[..., None]
        embeddings = embeddings.masked_scatter(places, image.to(embeddings.dtype))
        # Without positions, as HPSv3 was trained: Qwen2-VL would give the image's tokens positions on two axes.
        states = self.model.language_model(
            inputs_embeds=embeddings, attention_mask=attention_mask, use_cache=False
        ).last_hidden_state
        return self.rm_head(states[input_ids == reward_token].float())[:, 0]
