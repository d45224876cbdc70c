"""HPSv3: the score of a Qwen2-VL with a regression head. Source: Ma et al. 2025 (arXiv 2508.03789), `hpsv3` 1.0."""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from solrl_proto.text_files import read_text
from torch import Tensor

from solrl_core.fingerprint import combined_digest, module_digest, tokenizer_digest
from solrl_core.rewards.batched import BatchedReward
from solrl_core.rewards.images import as_pil
from solrl_core.rewards.loading import TOKENIZER, RewardFile, dtype_named, published_or, tokenizer_at
from solrl_core.rewards.reward import checks_prompts

REPOSITORY, CHECKPOINT = "MizzenAI/HPSv3", "HPSv3.safetensors"
DEFAULT_PROCESSOR = "Qwen/Qwen2-VL-7B-Instruct"
REWARD_TOKEN, IMAGE_TOKEN = "<|Reward|>", "<|image_pad|>"
PIXELS = 256 * 28 * 28
"""Pixels of every image after resizing, up to the rounding of its sides to whole patches."""


def check_prompt(text: str, metadata: Mapping[str, Any]) -> None:
    """Refuse a prompt with a token that HPSv3's question reserves, by a ValueError."""
    for token in (REWARD_TOKEN, IMAGE_TOKEN):
        if token in text:
            raise ValueError(f"it has {token}, a token of HPSv3's own question; expected a prompt without it")


@checks_prompts(check_prompt)
class HpsV3(BatchedReward):
    """Scores each (image, prompt) pair with the mean that HPSv3 predicts.

    Args:
        checkpoint: .safetensors or torch file in HPSv3's format. The default downloads it from the hub.
        processor: folder or hub id of the Qwen2-VL that it was trained from: its config.json and tokenizer.
        device, dtype, batch_size: device, dtype of the weights except for the head, and images per batch.

    Attributes:
        digest: digest of weights, tokenizer, question and preprocessing.

    Raises:
        OSError: files are missing.
        ValueError: the checkpoint, the tokenizer or an option is invalid.
    """

    parameters = 7_748_610_610

    dtype = "bfloat16"
    """Dtype of the weights by default, as published."""

    @staticmethod
    def sources(options: Mapping[str, Any]) -> tuple[RewardFile, ...]:
        weights = published_or(options.get("checkpoint"), REPOSITORY, CHECKPOINT)
        return weights, RewardFile(options.get("processor", DEFAULT_PROCESSOR), TOKENIZER, "processor")

    def __init__(
        self,
        checkpoint: str | None = None,
        processor: str = DEFAULT_PROCESSOR,
        *,
        device: str = "cpu",
        dtype: str = dtype,
        batch_size: int = 8,
    ) -> None:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        from solrl_core.rewards.convert import hpsv3_model

        super().__init__(device, batch_size)
        self._tokenizer = tokenizer_at(processor)
        if not self._tokenizer.chat_template:
            raise ValueError(f"the tokenizer of {processor!r} has no chat template; expected that of a Qwen2-VL")
        self._tokenizer.add_special_tokens({"additional_special_tokens": [REWARD_TOKEN]})
        self._reward_token: int = self._tokenizer.convert_tokens_to_ids(REWARD_TOKEN)
        weights = published_or(checkpoint, REPOSITORY, CHECKPOINT)
        network = hpsv3_model(weights.fetched(), processor, dtype_named(dtype))
        config, image_token = network.config, self._tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
        if len(self._tokenizer) > config.text_config.vocab_size or image_token != config.image_token_id:
            raise ValueError(
                f"got a tokenizer of {len(self._tokenizer)} tokens, where {IMAGE_TOKEN} is {image_token}; the model "
                f"expects at most {config.text_config.vocab_size}, and {config.image_token_id}: pass the model's "
                "tokenizer as option `processor`"
            )
        self._images = Qwen2VLImageProcessorPil(size={"shortest_edge": PIXELS, "longest_edge": PIXELS})
        self._merged: int = self._images.merge_size**2
        self._model = network.to(device)
        # The text that the published weights were trained with, from the package `hpsv3` (MIT licence).
        self._question = read_text(files("solrl_core.rewards").joinpath("hpsv3_question.txt"))
        self.digest = combined_digest(
            module_digest(network),
            tokenizer_digest(self._tokenizer),
            self._tokenizer.chat_template,
            self._question,
            f"{PIXELS} pixels; bicubic",
        )

    def _scores(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        inputs = self._images(as_pil(images), return_tensors="pt")
        counts = (inputs.image_grid_thw.prod(1) // self._merged).tolist()
        texts = [self._text(prompt, count) for prompt, count in zip(prompts, counts, strict=True)]
        tokens = self._tokenizer(texts, padding=True, padding_side="right", return_tensors="pt").to(self._device)
        scores: Tensor = self._model(
            tokens.input_ids,
            tokens.attention_mask,
            inputs.pixel_values.to(self._device),
            inputs.image_grid_thw.to(self._device),
            self._reward_token,
        )
        return scores

    def _text(self, prompt: str, image_tokens: int) -> str:
        """The conversation about an image and its prompt, with `image_tokens` tokens for the image."""
        check_prompt(prompt, {})
        question = {"type": "text", "text": self._question.replace("{prompt}", prompt)}
        messages = [{"role": "user", "content": [{"type": "image"}, question]}]
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text.replace(IMAGE_TOKEN, IMAGE_TOKEN * image_tokens)
