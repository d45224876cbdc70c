"""ImageReward: (r − 0.16717) / 1.03334 of a BLIP. Source: Xu et al. 2023 (arXiv 2304.05977), `image-reward` 1.5."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from solrl_core.fingerprint import combined_digest, module_digest, tokenizer_digest
from solrl_core.rewards.batched import BatchedReward
from solrl_core.rewards.images import Normalize, as_pil, pil_squares
from solrl_core.rewards.loading import (
    CONFIG,
    RewardFile,
    dtype_named,
    pretrained,
    published_or,
    require_one,
    tokenizer_at,
    tokenizer_file,
)

REPOSITORY, CHECKPOINT, MED_CONFIG = "zai-org/ImageReward", "ImageReward.pt", "med_config.json"
DEFAULT_TOKENIZER = "bert-base-uncased"
TOKENS = 35


class ImageReward(BatchedReward):
    """Scores each (image, prompt) pair with a BLIP; 8-bit images go through PIL, as in the published package.

    Args:
        model: folder or hub id written by `ImageRewardModel.save_pretrained`; excludes `checkpoint`.
        processor: folder or hub id of the BERT tokenizer; by default `model` if that is a folder, else BERT's.
        checkpoint: file in ImageReward's format. The default downloads it from the hub.
        med_config: BLIP's text settings for a checkpoint; by default the med_config.json next to it.
        vision_heads: attention heads of a checkpoint's image encoder, which its shapes do not reveal.
        device, dtype, batch_size: device, dtype of the weights, and images per batch.

    Attributes:
        digest: digest of weights, tokenizer and preprocessing.

    Raises:
        OSError: files are missing.
        ValueError: the model, the checkpoint, the tokenizer or an option is invalid.
    """

    parameters = 446_206_689

    @staticmethod
    def sources(options: Mapping[str, Any]) -> tuple[RewardFile, ...]:
        model, checkpoint = options.get("model"), options.get("checkpoint")
        require_one(model, checkpoint)
        tokenizer = tokenizer_file(model, options.get("processor"), DEFAULT_TOKENIZER)
        if model:
            return RewardFile(model, CONFIG), tokenizer
        beside = str(Path(checkpoint).parent / MED_CONFIG) if checkpoint else None
        settings = published_or(options.get("med_config") or beside, REPOSITORY, MED_CONFIG, "med_config")
        return published_or(checkpoint, REPOSITORY, CHECKPOINT), settings, tokenizer

    def __init__(
        self,
        model: str | None = None,
        processor: str | None = None,
        checkpoint: str | None = None,
        med_config: str | None = None,
        *,
        vision_heads: int = 16,
        device: str = "cpu",
        dtype: str = "float32",
        batch_size: int = 32,
    ) -> None:
        from solrl_core.rewards.blip import ImageRewardModel
        from solrl_core.rewards.convert import image_reward_model

        super().__init__(device, batch_size)
        options = {"model": model, "processor": processor, "checkpoint": checkpoint, "med_config": med_config}
        *weights, tokenizer = self.sources(options)
        if model:
            network = pretrained(ImageRewardModel, model, dtype_named(dtype))
        else:
            checkpoint, med_config = (file.fetched() for file in weights)
            network = image_reward_model(checkpoint, med_config, vision_heads, dtype_named(dtype))
        self._tokenizer = _with_blip_tokens(tokenizer_at(tokenizer.where))
        if len(self._tokenizer) > network.config.text_config.vocab_size:
            raise ValueError(
                f"got a tokenizer of {len(self._tokenizer)} tokens; the model expects at most "
                f"{network.config.text_config.vocab_size}: pass the model's tokenizer as option `processor`"
            )
        self._model = network.to(device)
        self._side: int = network.config.vision_config.image_size
        self._length = min(TOKENS, network.config.text_config.max_position_embeddings)
        self._normalize = Normalize()
        self.digest = combined_digest(
            module_digest(network), tokenizer_digest(self._tokenizer), f"{self._length} tokens; bicubic, centre"
        )

    def unread_tokens(self, text: str) -> int:
        """Number of a text's tokens beyond the model's limit."""
        tokens, length = self._tokenizer(text, verbose=False).input_ids, int(self._length)
        return max(0, len(tokens) - length)

    def _scores(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        pixels = self._normalize(pil_squares(as_pil(images), self._side))
        tokens = self._tokenizer(
            list(prompts), padding="max_length", max_length=self._length, truncation=True, return_tensors="pt"
        ).to(self._device)
        scores: Tensor = self._model(
            pixels.to(self._device, self._model.dtype), tokens.input_ids, tokens.attention_mask
        )
        return scores


def _with_blip_tokens(tokenizer: Any) -> Any:
    """Add BLIP's two special tokens to BERT's tokenizer. A prompt that spells one is tokenised as it."""
    if tokenizer.bos_token != "[DEC]":
        tokenizer.add_special_tokens({"bos_token": "[DEC]"})
    if "[ENC]" not in tokenizer.get_vocab():
        tokenizer.add_special_tokens({"additional_special_tokens": ["[ENC]"]})
    return tokenizer
