"""Z-Image: Qwen3 text encoder, transformer of single-stream blocks, FLUX.1's 16-channel VAE.

Source: Z-Image Team, arXiv 2511.22699, through diffusers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from solrl_core.families.backbone import Conditioning
from solrl_core.families.pipeline import PipelineBackbone, replace_children, token_counts
from solrl_core.kernels.attention import attend
from solrl_core.model_options import ImageSize, ModelOptions
from solrl_core.precision.fp8 import project
from solrl_core.precision.fuse import FusedBlock, image_layers
from solrl_core.precision.layer_policy import LayerPolicy


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
        return super().pipeline_call(options, config, guidance) | {"guidance_scale": guidance - 1}

    def sigmas(self, steps: int) -> list[float]:
        """Schedule of the pipeline: a static shift (6 for Z-Image, 3 for Turbo), or a dynamic one if so configured."""
        return self._flow_match_sigmas(steps, torch.linspace(1, 1 / steps, steps).tolist())

    def fuse(self, transformer: nn.Module) -> None:
        """Swap in blocks that quantise a shared input once and rotate without complex numbers."""
        super().fuse(transformer)
        for blocks in self.blocks:
            replace_children(transformer.get_submodule(blocks), ZImageFusedBlock)
        untyped: Any = transformer
        embedder = untyped.rope_embedder
        untyped.rope_embedder = lambda ids: torch.view_as_real(embedder(ids))

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
        self, transformer: nn.Module, latents: Tensor, sigma: Tensor, conditioning: Conditioning, guidance: float = 1.0
    ) -> Tensor:
        """Velocity from one forward pass, or two with classifier-free guidance.

        Rows with unequal numbers of text tokens need attention with a mask, which is slower. The empty prompt is
        therefore not in one batch with other prompts.
        """

        def predict(prefix: str) -> Tensor:
            states, mask = conditioning[f"{prefix}states"].to(self.dtype), conditioning[f"{prefix}mask"]
            # Without values, plan for the longest prompts.
            counts = [mask.shape[1]] * len(mask) if mask.is_meta else mask.sum(1).tolist()
            rows: list[Tensor] = transformer(
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


_MASKED = -10000.0
"""Added to the logits of padding."""


class ZImageFusedBlock(FusedBlock):
    """Fused `ZImageTransformerBlock` of diffusers."""

    def __init__(self, block: Any) -> None:
        super().__init__(block)
        self.modulation: bool = block.modulation

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None,
        freqs_cis: Tensor,
        adaln_input: Tensor | None = None,
        *_: Tensor | None,
    ) -> Tensor:
        """Tokens [B, S, C] after the block.

        Args:
            x: [B, S, C].
            attn_mask: bool [B, S], False for padding; None for rows of equal length.
            freqs_cis: cosines and sines, float32 [B, S, D/2, 2].
            adaln_input: [B, E], for blocks with modulation.
        """
        scale, gate, ff_scale, ff_gate = self._modulations(adaln_input)
        out = self._attend(self.attention_norm1(x) * scale, attn_mask, freqs_cis)
        x = x + gate * self.attention_norm2(out)
        forward = self.feed_forward
        wide, up = project([forward.w1, forward.w3], self.ffn_norm1(x) * ff_scale)
        result: Tensor = x + ff_gate * self.ffn_norm2(forward.w2(F.silu(wide) * up))
        return result

    def _modulations(self, emb: Tensor | None) -> tuple[Any, ...]:
        """Scale and gate of attention and of feed-forward, each [B, 1, C]; 1 without modulation."""
        if not self.modulation:
            return 1, 1, 1, 1
        scale, gate, ff_scale, ff_gate = self.adaLN_modulation(emb)[:, None].chunk(4, 2)
        return 1 + scale, gate.tanh(), 1 + ff_scale, ff_gate.tanh()

    def _attend(self, x: Tensor, mask: Tensor | None, angles: Tensor) -> Tensor:
        attn = self.attention
        query, key, value = (y.view(*y.shape[:2], attn.heads, -1) for y in project(image_layers(attn), x))
        bias = None if mask is None else ((~mask).to(x.dtype) * _MASKED)[:, None, None]
        out = attend(_rotated(attn.norm_q, query, angles), _rotated(attn.norm_k, key, angles), value, bias)
        projected: Tensor = attn.to_out[0](out.flatten(2))
        return projected


def _rotated(norm: nn.Module | None, x: Tensor, angles: Tensor) -> Tensor:
    """Normalise each head of x [B, S, H, D], then rotate pairs of neighbouring components in float32."""
    pairs = (x if norm is None else norm(x)).float()
    even, odd = pairs.view(*pairs.shape[:-1], -1, 2).unbind(-1)
    cos, sin = angles[:, :, None].unbind(-1)
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2).to(x.dtype)
