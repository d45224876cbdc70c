"""Wan: UMT5 text encoder, one-stream transformer with cross-attention, causal VAE of videos. Its samples are clips.

Source: Wan Team, arXiv 2503.20314, through diffusers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from solrl_core.families.backbone import Conditioning
from solrl_core.families.pipeline import (
    PipelineBackbone,
    channel_statistics,
    most_likely,
    replace_children,
    token_counts,
)
from solrl_core.kernels.attention import attend
from solrl_core.kernels.fp8_attention import fp8_attention, has_fp8_attention
from solrl_core.model_options import ImageSize, ModelOptions
from solrl_core.precision.fp8 import Quantized, by_row, project
from solrl_core.precision.fuse import FusedBlock, image_layers, modulate
from solrl_core.precision.layer_policy import LayerPolicy


class Wan(PipelineBackbone):
    """A Wan 2.1 pipeline for text to video, or Wan 2.2's with one transformer, loaded through diffusers.

    Latents are [B, C, T, H / f, W / f] for clips of F frames, with T = (F − 1) / 4 + 1. One frame is an image.
    """

    family = "wan"
    size = ImageSize(480, 832, 33)  # The published 480p, and Flow-GRPO's two seconds; the configuration gives neither.
    blocks = ("blocks",)
    max_sequence_length = 512
    frame_step = 4
    # Flow-GRPO's.
    lora_targets = r"blocks\.\d+\.attn[12]\.(to_[qkv]|to_out\.0)"
    quantize = (r"^blocks\.",)
    keep = ()
    fp8_policy = LayerPolicy(quantize=quantize)

    def __init__(self, pipeline: Any, name: str, options: ModelOptions) -> None:
        if pipeline.transformer_2 is not None:
            raise ValueError(
                f"{name} has two transformers, for high and for low noise; expected a Wan with one, such as Wan2.1, "
                "because an adapter is of one"
            )
        super().__init__(pipeline, name, options)
        # The first parameters stay in float32.
        self.dtype = self.transformer.get_parameter("proj_out.weight").dtype

    @classmethod
    def pipeline_call(cls, options: ModelOptions, config: Mapping[str, Any], guidance: float) -> dict[str, Any]:
        return super().pipeline_call(options, config, guidance) | {
            "num_frames": options.frames or cls.own_size(config).frames
        }

    @property
    def _patch_size(self) -> int:
        size: int = self._config.patch_size[1]
        return size

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """(channels, (frames − 1) / 4 + 1, height / f, width / f)."""
        times = (self.frames - 1) // self.frame_step + 1
        return self._pipeline.vae.config.z_dim, times, self.height // self._scale, self.width // self._scale

    def sigmas(self, steps: int) -> list[float]:
        """Noise levels of the pipeline's UniPC: from 1 evenly towards 1/1000, with the scheduler's static shift."""
        config = self._pipeline.scheduler.config
        shift = config.get("flow_shift") or config.get("shift", 1.0)
        unshifted = torch.linspace(1, 1 / config.num_train_timesteps, steps + 1, dtype=torch.float64)
        return [*(shift * unshifted / (1 + (shift - 1) * unshifted)).tolist()[:-1], 0.0]

    def fuse(self, transformer: nn.Module) -> None:
        """Swap in blocks that fuse norms with quantisation and quantise a shared input once."""
        super().fuse(transformer)
        replace_children(transformer.get_submodule("blocks"), WanFusedBlock)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], guidance: float = 1.0) -> Conditioning:
        """UMT5's states of the cleaned prompts, zero at padding; with guidance above 1, also of the empty prompt."""
        conditioning = {"states": self._states(prompts)}
        if guidance > 1:
            conditioning["negative_states"] = self._states([""]).expand_as(conditioning["states"])
        return conditioning

    def _states(self, prompts: Sequence[str]) -> Tensor:
        pipeline = self._pipeline
        tokens = pipeline.tokenizer(
            _cleaned(prompts),
            padding="max_length",
            max_length=self.max_sequence_length,
            truncation=True,
            return_tensors="pt",
        ).to(self.device)
        states = pipeline.text_encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state
        return torch.where(tokens.attention_mask[..., None].bool(), states, 0)

    def truncated_tokens(self, prompts: Sequence[str]) -> list[int]:
        """Tokens of the cleaned prompts beyond the limit."""
        counts = token_counts(self._pipeline.tokenizer, _cleaned(prompts))
        return [max(0, count - self.max_sequence_length) for count in counts]

    def predict(self, transformer: nn.Module, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        out: Tensor = transformer(
            latents.to(self.dtype),
            sigma.to(self.device) * 1000,
            conditioning["states"].to(self.dtype),
            return_dict=False,
        )[0]
        return out.float()

    @torch.no_grad()
    def _decoded(self, vae: Any, latents: Tensor) -> Tensor:
        """Decode one latent frame after the other, with a cache of its own: `vae.decode` shares one among threads."""
        from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, unpatchify

        mean, std = channel_statistics(vae, latents.device, vae.dtype)
        latents = vae.post_quant_conv(latents.to(vae.dtype) * std + mean)
        cache = [None] * sum(isinstance(part, WanCausalConv3d) for part in vae.decoder.modules())
        parts = [
            vae.decoder(frame, feat_cache=cache, feat_idx=[0], first_chunk=index == 0)
            for index, frame in enumerate(torch.split(latents, 1, 2))
        ]
        clips: Tensor = torch.cat(parts, 2)
        if vae.config.patch_size is not None:
            clips = unpatchify(clips, vae.config.patch_size)
        return clips.transpose(1, 2) if self.frames > 1 else clips[:, :, 0]

    def _encoded(self, vae: Any, images: Tensor) -> Tensor:
        clips = images.transpose(1, 2) if images.ndim == 5 else images[:, :, None]
        mean, std = channel_statistics(vae, images.device, torch.float32)
        return (most_likely(vae.encode(clips, return_dict=False)[0]).float() - mean) / std


def _cleaned(prompts: Sequence[str]) -> list[str]:
    """Prompts as the pipeline cleans them: mended Unicode, no HTML entities, single spaces."""
    from diffusers.pipelines.wan.pipeline_wan import prompt_clean

    return [prompt_clean(prompt) for prompt in prompts]


class WanFusedBlock(FusedBlock):
    """Fused `WanTransformerBlock` of diffusers."""

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, rotary_emb: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Return tokens [B, S, C] from `temb` [B, 6, C] and cosines and sines [1, S, 1, head width]."""
        x = hidden_states
        shift, scale, gate, *modulation = (self.scale_shift_table + temb.float()).unbind(1)
        attn = self.attn1
        q, k, v = project(image_layers(attn), _modulated(x, self.norm1, scale, shift, image_layers(attn)))
        q, k = (_rotated(_heads(norm(y), attn), rotary_emb) for norm, y in ((attn.norm_q, q), (attn.norm_k, k)))
        fast = by_row(image_layers(attn)) and has_fp8_attention(x.device, q.shape[-1])
        x = _added(x, _attended(attn, q, k, v, fp8_attention if fast else attend), gate)
        attn = self.attn2
        k, v = project([attn.to_k, attn.to_v], encoder_hidden_states)
        q = attn.norm_q(attn.to_q(self.norm2(x.float()).to(x.dtype)))
        x = x + _attended(attn, _heads(q, attn), _heads(attn.norm_k(k), attn), v, attend)
        shift, scale, gate = modulation
        return _added(x, self.ffn(_modulated(x, self.norm3, scale, shift, [self.ffn.net[0].proj])), gate)


def _modulated(x: Tensor, norm: Any, scale: Tensor, shift: Tensor, layers: list[nn.Module]) -> Tensor | Quantized:
    """`modulate`, which is in float32 here even if nothing is quantised."""
    if by_row(layers):
        return modulate(x, norm, scale, shift, layers)
    modulated: Tensor = norm(x.float()) * (1 + scale[:, None]) + shift[:, None]
    return modulated.to(x.dtype)


def _added(x: Tensor, out: Tensor, gate: Tensor) -> Tensor:
    return (x.float() + out.float() * gate[:, None]).to(x.dtype)


def _heads(x: Tensor, attn: Any) -> Tensor:
    return x.view(*x.shape[:2], attn.heads, -1)


def _attended(attn: Any, query: Tensor, key: Tensor, value: Tensor, attention: Callable[..., Tensor]) -> Tensor:
    """Output [B, S, C] of an attention whose query and key have heads [B, S, H, D]."""
    out: Tensor = attn.to_out[0](attention(query, key, _heads(value, attn)).flatten(2))
    return out


def _rotated(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate pairs of neighbouring components of x [B, S, H, D]; each pair's cosine and sine come twice."""
    cos, sin = (values[..., 0::2] for values in angles)
    even, odd = x.view(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2).to(x.dtype)
