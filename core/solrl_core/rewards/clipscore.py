"""CLIPScore: logits_per_image / 100 of a CLIP model. Source: the FlowGRPO and DiffusionNFT reward servers."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from solrl_core.fingerprint import combined_digest, module_digest, tokenizer_digest

DEFAULT_MODEL = "openai/clip-vit-large-patch14"


class ClipScore:
    """Scores (image, prompt) pairs. Loads any transformers CLIP with its processor.

    Args:
        model: folder or hub id.
        device: where it runs, in float32.
    """

    def __init__(self, model: str = DEFAULT_MODEL, device: str = "cpu") -> None:
        from transformers import AutoTokenizer, CLIPImageProcessorPil, CLIPModel

        self._model = CLIPModel.from_pretrained(model, dtype=torch.float32).to(device).eval().requires_grad_(False)
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        images = CLIPImageProcessorPil.from_pretrained(model)
        self._mean = torch.tensor(images.image_mean, device=device)[:, None, None]
        self._std = torch.tensor(images.image_std, device=device)[:, None, None]
        self._size: int = self._model.config.vision_config.image_size
        self._length: int = self._model.config.text_config.max_position_embeddings
        self._texts: dict[str, torch.Tensor] = {}
        self.digest = combined_digest(
            module_digest(self._model),
            tokenizer_digest(self._tokenizer),
            f"{images.image_mean} {images.image_std}",
        )

    @torch.inference_mode()
    def __call__(
        self, images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> torch.Tensor:
        """Return logits_per_image / 100 of each pair, float32 [N]."""
        pixels = (self._square(images.to(self._mean.device).float()) - self._mean) / self._std
        seen = self._model.get_image_features(pixel_values=pixels).pooler_output
        said = torch.stack([self._encode(prompt) for prompt in prompts])
        cosine = F.cosine_similarity(seen, said, dim=-1)
        scores: torch.Tensor = cosine * self._model.logit_scale.exp() / 100
        return scores

    def _square(self, images: torch.Tensor) -> torch.Tensor:
        """Shortest side to the model's size (bilinear, antialiased), then the centre."""
        height, width = images.shape[-2:]
        short = min(height, width)
        if short != self._size:
            size = (height * self._size // short, width * self._size // short)
            images = F.interpolate(images, size=size, mode="bilinear", antialias=True)
        top, left = ((side - self._size) // 2 for side in images.shape[-2:])
        return images[..., top : top + self._size, left : left + self._size]

    def _encode(self, prompt: str) -> torch.Tensor:
        if prompt not in self._texts:
            tokens = self._tokenizer(
                [prompt], padding="max_length", max_length=self._length, truncation=True, return_tensors="pt"
            ).to(self._mean.device)
            self._texts[prompt] = self._model.get_text_features(**tokens).pooler_output[0]
        return self._texts[prompt]
