"""Z-Image: Qwen3 text encoder, transformer of single-stream blocks, FLUX.1's 16-channel VAE.

Source: Z-Image Team, arXiv 2511.22699, through diffusers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from solrl_core.families.backbone import Conditioning
from solrl_core.families.pipeline import PipelineBackbone, replace_children, token_counts
from solrl_core.families.z_image_fused import RealAngles, ZImageFusedBlock
from solrl_core.model_options import ImageSize, ModelOptions
from solrl_core.precision import LayerPolicy


class ZImage(PipelineBackbone):
    """A Z-Image or Z-Image-Turbo pipeline loaded through diffusers.

    The transformer takes lists of rows, since prompts differ in their numbers of text tokens. It predicts x0 − noise
    at the time 1 − σ. Guidance g is the pipeline's `guidance_scale` of g − 1, which is 0 for none.
    """

    family = "z-image"
    size = ImageSize(512, 512)  # UniRL and Flow-Factory train it at this size; its configuration gives none.
    patch = 2  # the configuration lists all sizes that the transformer supports
    blocks = ("noise_refiner", "context_refiner", "layers")
    one_length = False
    max_sequence_length = 512
    lora_targets = r"(noise_refiner|context_refiner|layers)\.\d+\.attention\.(to_[qkv]|to_out\.0)"
    # The modulation has one row per candidate: quantising it saves nothing. At four bits, attention loses the most.
    quantize = (r"^layers\.\d+\.feed_forward\.",)
    keep = ()
    fp8_policy = LayerPolicy(quantize=(r"^(noise_refiner|context_refiner|layers)\.",), keep=("adaLN_modulation",))

    @classmethod
    def pipeline_call(cls, options: ModelOptions, config: Mapping[str, Any], guidance: float) -> dict[str, Any]:
        """With the pipeline's own scale of guidance."""
        return super().pipeline_call(options, config, guidance) | {"guidance_scale": guidance - 1}

    def sigmas(self, steps: int) -> list[float]:
        """Schedule of the pipeline: a static shift (6 for Z-Image, 3 for Turbo), or a dynamic one if so configured."""
        return self._flow_match_sigmas(steps, torch.linspace(1, 1 / steps, steps).tolist())

    def fuse(self, transformer: nn.Module) -> None:
        """Swap in blocks that quantise a shared input once and rotate without complex numbers."""
        super().fuse(transformer)
        for blocks in self.blocks:
            replace_children(transformer.get_submodule(blocks), ZImageFusedBlock)
        whole: Any = transformer
        whole.rope_embedder = RealAngles(whole.rope_embedder)

    def _as_chat(self, prompt: str) -> str:
        messages = [{"role": "user", "content": prompt}]
        text: str = self._pipeline.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        return text

    def truncated_tokens(self, prompts: Sequence[str]) -> list[int]:
        """Tokens of the prompts beyond the limit, which also counts the chat template before them."""
        before = self._as_chat("prompt").partition("prompt")[0]
        counts = token_counts(self._pipeline.tokenizer, [before + prompt for prompt in prompts])
        return [max(0, count - self.max_sequence_length) for count in counts]

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], guidance: float = 1.0) -> Conditioning:
        """Qwen3's states before its last layer and their mask, padded; with guidance above 1, also for ""."""
        conditioning = self._padded(prompts)
        if guidance > 1:
            negative = self._padded([""] * len(prompts))
            conditioning |= {f"negative_{name}": tensor for name, tensor in negative.items()}
        return conditioning

    def _padded(self, prompts: Sequence[str]) -> Conditioning:
        """Each prompt is encoded alone: with padding, the numbers would depend on it."""
        pipeline, length = self._pipeline, self.max_sequence_length
        states, masks = [], []
        for prompt in prompts:
            ids = pipeline.tokenizer(
                self._as_chat(prompt), max_length=length, truncation=True, return_tensors="pt"
            ).input_ids
            out = pipeline.text_encoder(input_ids=ids.to(self.device), output_hidden_states=True).hidden_states[-2]
            padding = length - ids.shape[1]
            states.append(F.pad(out, (0, 0, 0, padding)))
            masks.append(F.pad(torch.ones_like(ids, device=self.device), (0, padding)))
        return {"states": torch.cat(states), "mask": torch.cat(masks)}

    def velocity(
        self,
        transformer: nn.Module,
        latents: torch.Tensor,
        sigma: torch.Tensor,
        conditioning: Conditioning,
        guidance: float = 1.0,
    ) -> torch.Tensor:
        """Velocity from one forward pass, or two with classifier-free guidance.

        Rows with unequal numbers of text tokens need attention with a mask, which is slower. The empty prompt is
        therefore not in one batch with other prompts.
        """

        def predict(prefix: str) -> torch.Tensor:
            states, mask = conditioning[f"{prefix}states"].to(self.dtype), conditioning[f"{prefix}mask"]
            # Without values, plan for the longest prompts.
            counts = [mask.shape[1]] * len(mask) if mask.is_meta else mask.sum(1).tolist()
            rows: list[torch.Tensor] = transformer(
                list(latents.to(self.dtype)[:, :, None]),
                1 - sigma.to(self.device),
                [row[:count] for row, count in zip(states, counts, strict=True)],
                return_dict=False,
            )[0]
            return -torch.stack(rows)[:, :, 0].float()

        if guidance <= 1:
            return predict("")
        without = predict("negative_")
        return without + guidance * (predict("") - without)
