"""Base class of the CLIP rewards: batched cosine similarity of images and prompts, with a bounded text cache."""

from abc import abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from solrl_core.fingerprint import combined_digest, module_digest, tokenizer_digest
from solrl_core.rewards.batched import BatchedReward

CACHED_TEXTS = 4096


class ClipReward(BatchedReward):
    """Scores (image, prompt) pairs by the cosine of their features.

    Args:
        model: a transformers CLIPModel.
        tokenizer: its fast tokenizer; prompts are truncated to the model's positions, keeping the end-of-text token.
        preprocessing: description of image and text preprocessing, part of the digest.
        device, batch_size: device of the model, and images per batch.

    Attributes:
        digest: digest of weights, tokenizer and preprocessing.

    Raises:
        ValueError: the tokenizer does not belong to the model.
    """

    def __init__(self, model: Any, tokenizer: Any, preprocessing: str, *, device: str, batch_size: int) -> None:
        texts = model.config.text_config
        # CLIP reads text features at the end-of-text token; with a different token there they would be meaningless.
        if texts.eos_token_id not in (tokenizer.eos_token_id, 2) or len(tokenizer) > texts.vocab_size:
            raise ValueError(
                f"got a tokenizer of {len(tokenizer)} tokens with end-of-text token {tokenizer.eos_token_id}; "
                f"the model expects at most {texts.vocab_size} tokens and end-of-text token {texts.eos_token_id}: pass "
                "the tokenizer that the model was trained with as option `processor`"
            )
        super().__init__(device, batch_size)
        self._model = model.to(device).eval().requires_grad_(False)
        self._tokenizer = tokenizer
        self._side: int = model.config.vision_config.image_size
        # Each text is encoded alone, so that its features do not depend on a batch.
        self._text_features = lru_cache(maxsize=CACHED_TEXTS)(
            lambda text: text_features(model, tokenizer, [self._clean(text)])[0]
        )
        self.digest = combined_digest(module_digest(model), tokenizer_digest(tokenizer), preprocessing)

    def unread_tokens(self, text: str) -> int:
        """Number of a text's tokens that do not count: beyond the model's positions, or after an end of text in it."""
        tokens: list[int] = self._tokenizer(self._clean(text), verbose=False).input_ids
        last, positions = len(tokens) - 1, int(self._model.config.text_config.max_position_embeddings)
        end = tokens.index(self._tokenizer.eos_token_id)
        # Features are read at the first end of text, or at the one that replaces the last token of a truncated text.
        return last - end - 1 if end < min(last, positions) else max(0, last - positions + 1)

    def _scores(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        texts = torch.stack([self._text_features(text) for text in prompts])
        features = image_features(self._model, self._pixels(images.to(self._device).float()))
        return self._score(F.cosine_similarity(features, texts))

    @abstractmethod
    def _pixels(self, images: torch.Tensor) -> torch.Tensor:
        """Preprocess images [N, 3, H, W] in [0, 1], float32 on the reward's device, to [N, 3, S, S]."""

    @abstractmethod
    def _score(self, cosines: torch.Tensor) -> torch.Tensor:
        """Convert cosines [N] to scores [N]."""

    def _clean(self, prompt: str) -> str:
        return prompt


def image_features(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Features, float32 [N, D], that a CLIPModel gives preprocessed images [N, 3, S, S]."""
    features: torch.Tensor = model.get_image_features(pixel_values=pixels.to(model.device, model.dtype)).pooler_output
    return features.float()


def text_features(model: Any, tokenizer: Any, texts: Sequence[str]) -> torch.Tensor:
    """Features, float32 [N, D], that a CLIPModel gives N texts; they are truncated to the model's positions."""
    tokens = tokenizer(
        list(texts),
        padding="max_length",
        max_length=model.config.text_config.max_position_embeddings,
        truncation=True,
        return_tensors="pt",
    ).to(model.device)
    features: torch.Tensor = model.get_text_features(
        input_ids=tokens.input_ids, attention_mask=tokens.attention_mask
    ).pooler_output
    return features.float()
