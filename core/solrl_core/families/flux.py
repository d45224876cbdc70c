"""FLUX.1: pooled CLIP and T5 embeddings, transformer of double- and single-stream blocks, 16-channel VAE.

Source: Black Forest Labs, FLUX.1, through diffusers; layer choices of Sol-RL, arXiv 2604.06916.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from solrl_core.families.backbone import Conditioning
from solrl_core.families.flux_fused import FluxFusedBlock, FluxFusedSingleBlock, once_a_pair
from solrl_core.families.pipeline import PipelineBackbone, replace_children
from solrl_core.model_options import ImageSize
from solrl_core.precision.fuse import Mapped
from solrl_core.precision.layer_policy import LayerPolicy

PATCH = 2
"""Latent pixels along the side of one image token."""


class Flux(PipelineBackbone):
    """A FLUX.1 pipeline loaded through diffusers.

    Latents are [B, C, H/8, W/8] everywhere; only the transformer takes them packed into 2×2 patches.
    Guidance is never classifier-free: the guidance-distilled model (dev) takes it as an input, 1.0 included, and the
    other (schnell) ignores it.
    """

    family = "flux"
    size = ImageSize(512, 512)  # Sol-RL's size; FLUX.1's configuration gives none.
    patch = PATCH
    blocks = ("transformer_blocks", "single_transformer_blocks")
    max_sequence_length = 128
    file_encoders = ("clip_l", "t5xxl")
    lora_targets = r"(single_)?transformer_blocks\.\d+\.attn\.(to_[qkv]|to_out\.0)"
    # The paper's list quantises the modulation, too, which has one row per candidate, and the last projection.
    quantize = (r"^(single_)?transformer_blocks\.",)
    keep = (r"\.norm",)
    fp8_policy = LayerPolicy(quantize=quantize, keep=keep)

    def sigmas(self, steps: int) -> list[float]:
        """Schedule of the pipeline: shifted by the number of image tokens if configured (dev), otherwise unshifted."""
        unshifted = torch.linspace(1, 1 / steps, steps, dtype=torch.float64).tolist()
        return self._flow_match_sigmas(steps, unshifted)

    def fuse(self, transformer: nn.Module) -> None:
        """Swap in blocks that fuse norms with quantisation, and attention's norms with its position embedding."""
        super().fuse(transformer)
        if not self._rotates_by_kernel:
            return
        transformer.pos_embed = Mapped(transformer.get_submodule("pos_embed"), once_a_pair)
        double, single = (transformer.get_submodule(name) for name in self.blocks)
        *_, last = single.children()
        replace_children(double, FluxFusedBlock)
        replace_children(single, lambda block: FluxFusedSingleBlock(block, last=block is last))

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], guidance: float = 1.0) -> Conditioning:
        """T5's states and CLIP's pooled embedding; independent of guidance."""
        states, pooled, _ = self._pipeline.encode_prompt(
            list(prompts), device=self.device, max_sequence_length=self.max_sequence_length
        )
        return {"states": states, "pooled": pooled}

    def velocity(
        self, transformer: nn.Module, latents: Tensor, sigma: Tensor, conditioning: Conditioning, guidance: float = 1.0
    ) -> Tensor:
        states = conditioning["states"]
        rows, columns = latents.shape[-2] // PATCH, latents.shape[-1] // PATCH
        out: Tensor = transformer(
            pack(latents).to(self.dtype),
            encoder_hidden_states=states.to(self.dtype),
            pooled_projections=conditioning["pooled"].to(self.dtype),
            # Round at the same point as the pipeline.
            timestep=(sigma.to(self.device) * 1000).to(self.dtype) / 1000,
            guidance=torch.full_like(sigma, guidance, device=self.device) if self._config.guidance_embeds else None,
            img_ids=position_ids(rows, columns, self.device),
            txt_ids=torch.zeros(states.shape[1], 3, device=self.device),
            return_dict=False,
        )[0]
        return unpack(out.float(), rows, columns)


def pack(latents: Tensor) -> Tensor:
    """[B, C, H, W] → [B, H/2 · W/2, 4 · C]: one token per 2×2 patch."""
    return F.pixel_unshuffle(latents, PATCH).flatten(2).mT


def unpack(packed: Tensor, rows: int, columns: int) -> Tensor:
    """Inverse of `pack`, for `rows` × `columns` patches."""
    return F.pixel_shuffle(packed.mT.reshape(len(packed), -1, rows, columns), PATCH)


def position_ids(rows: int, columns: int, device: torch.device) -> Tensor:
    """Position ids (0, row, column) of each patch in the order of `pack`: float32 [rows · columns, 3]."""
    axes = [torch.arange(size, dtype=torch.float32, device=device) for size in (1, rows, columns)]
    return torch.cartesian_prod(*axes)
