"""Qwen-Image: Qwen2.5-VL text encoder, two-stream transformer, 16-channel VAE for images and videos.

Source: Wu et al., arXiv 2508.02324, through diffusers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from solrl_core.families.backbone import Conditioning
from solrl_core.families.flux import PATCH, pack, unpack
from solrl_core.families.flux_fused import Angles, joint_attention
from solrl_core.families.pipeline import (
    PipelineBackbone,
    both_predictions,
    channel_statistics,
    most_likely,
    replace_children,
    token_counts,
)
from solrl_core.model_options import ImageSize, ModelOptions
from solrl_core.precision.fuse import FusedBlock, Mapped, add_and_feed_forward, image_layers, modulate, text_layers
from solrl_core.precision.layer_policy import LayerPolicy

_NEGATIVE = " "
"""The negative prompt of the model's authors."""
_THETA = 10000


class QwenImage(PipelineBackbone):
    """A Qwen-Image pipeline loaded through diffusers.

    Latents are [B, 16, H/8, W/8] everywhere; only the transformer takes them packed into 2×2 patches. Text is padded to
    `max_sequence_length` tokens, without the template's, and the padding is masked.
    """

    family = "qwen-image"
    size = ImageSize(512, 512)  # Of Flow-GRPO, verl-omni and Flow-Factory; its configuration gives none.
    max_sequence_length = 256  # verl-omni's
    # The targets of verl-omni, Flow-Factory and UniRL.
    lora_targets = (
        r"transformer_blocks\.\d+\."
        r"(attn\.(add_[qkv]_proj|to_add_out|to_[qkv]|to_out\.0)|(img|txt)_mlp\.net\.(0\.proj|2))"
    )
    # The modulation has one row per candidate: quantising it saves little and loses the most. At four bits, so does the
    # second layer of the image's feed-forward.
    quantize = (r"^transformer_blocks\.",)
    keep = (r"_mod\.", r"\.img_mlp\.net\.2$")
    fp8_policy = LayerPolicy(quantize=quantize, keep=(r"_mod\.",))

    def __init__(self, pipeline: Any, name: str, options: ModelOptions) -> None:
        pipeline.transformer.pos_embed = Positions(pipeline.transformer.config.axes_dims_rope)
        super().__init__(pipeline, name, options)

    @classmethod
    def pipeline_call(cls, options: ModelOptions, config: Mapping[str, Any], guidance: float) -> dict[str, Any]:
        """With classifier-free guidance, which the pipeline calls `true_cfg_scale`."""
        call = super().pipeline_call(options, config, guidance)
        call["true_cfg_scale"] = call.pop("guidance_scale")
        return call | ({"negative_prompt": _NEGATIVE} if guidance > 1 else {})

    @property
    def unused_lora_layers(self) -> str:
        """Text queries of the last block, and all layers after them: the block's text output is discarded."""
        last = len(list(self.transformer.get_submodule("transformer_blocks").children())) - 1
        return rf"transformer_blocks\.{last}\.(attn\.(add_q_proj|to_add_out)|txt_mlp\..*)"

    def sigmas(self, steps: int) -> list[float]:
        """Schedule of the pipeline: shifted by the number of image tokens and stretched to a last level above 0."""
        if steps == 1:
            return [1.0, 0.0]  # nothing to stretch
        unshifted = torch.linspace(1, 1 / steps, steps, dtype=torch.float64).tolist()
        return self._flow_match_sigmas(steps, unshifted)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], guidance: float = 1.0) -> Conditioning:
        """Qwen2.5-VL's states, zero at padding, and their mask; with guidance above 1, also of the negative prompt."""
        if guidance > 1:
            states, mask = self._states([*prompts, *[_NEGATIVE] * len(prompts)])
            (states, negative_states), (mask, negative_mask) = states.chunk(2), mask.chunk(2)
            return {
                "states": states,
                "mask": mask,
                "negative_states": negative_states,
                "negative_mask": negative_mask,
            }
        states, mask = self._states(prompts)
        return {"states": states, "mask": mask}

    def _states(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """States [B, T, C] and mask [B, T]. Attention is causal, so padding at the end needs no mask in the encoder."""
        pipeline = self._pipeline
        first = pipeline.prompt_template_encode_start_idx
        tokens = pipeline.tokenizer(
            [pipeline.prompt_template_encode.format(prompt) for prompt in prompts],
            max_length=self.max_sequence_length + first,
            padding="max_length",
            padding_side="right",
            truncation=True,
            return_tensors="pt",
        ).to(self.device)
        encoder = pipeline.text_encoder.model.language_model
        states = encoder(input_ids=tokens.input_ids, use_cache=False).last_hidden_state[:, first:]
        mask = tokens.attention_mask[:, first:].bool()
        return torch.where(mask[..., None], states, 0), mask

    def truncated_tokens(self, prompts: Sequence[str]) -> list[int]:
        """Tokens beyond the limit, which counts the template's tokens after the prompt, but not before it."""
        pipeline = self._pipeline
        template = pipeline.prompt_template_encode
        texts = [template.format(prompt) for prompt in prompts]
        after = token_counts(pipeline.tokenizer, [template.partition("{}")[2]])[0]
        limit = self.max_sequence_length + pipeline.prompt_template_encode_start_idx
        return [max(0, count - after - limit) for count in token_counts(pipeline.tokenizer, texts)]

    def velocity(
        self, transformer: nn.Module, latents: Tensor, sigma: Tensor, conditioning: Conditioning, guidance: float = 1.0
    ) -> Tensor:
        """Velocity from one forward pass, or two in one batch with classifier-free guidance.

        As in the pipeline, each guided patch is scaled to the length that it has without guidance.
        """
        rows, columns = latents.shape[-2] // PATCH, latents.shape[-1] // PATCH

        def predict(packed: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
            out: Tensor = transformer(
                packed.to(self.dtype),
                encoder_hidden_states=conditioning["states"].to(self.dtype),
                encoder_hidden_states_mask=conditioning["mask"],
                # Round at the same point as the pipeline.
                timestep=(sigma.to(self.device) * 1000).to(self.dtype) / 1000,
                img_shapes=[[(1, rows, columns)]] * len(packed),
                return_dict=False,
            )[0]
            return out.float()

        packed = pack(latents)
        if guidance <= 1:
            return unpack(predict(packed, sigma, conditioning), rows, columns)
        without, towards = both_predictions(predict, packed, sigma, conditioning)
        guided = without + guidance * (towards - without)
        return unpack(guided * (towards.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True)), rows, columns)

    def fuse(self, transformer: nn.Module) -> None:
        """Swap in blocks that fuse norms with quantisation, and attention's norms with its position embedding."""
        super().fuse(transformer)
        if not self._rotates_by_kernel:
            return
        transformer.pos_embed = Mapped(transformer.get_submodule("pos_embed"), real_angles)
        replace_children(transformer.get_submodule("transformer_blocks"), QwenFusedBlock)

    @torch.no_grad()
    def _decoded(self, vae: Any, latents: Tensor) -> Tensor:
        """Decode latents as videos of one frame, without the cache of earlier frames that `vae.decode` keeps."""
        mean, std = channel_statistics(vae, latents.device, vae.dtype)
        out: Tensor = vae.decoder(vae.post_quant_conv(latents[:, :, None].to(vae.dtype) * std + mean))
        return out[:, :, 0]

    def _encoded(self, vae: Any, images: Tensor) -> Tensor:
        mean, std = channel_statistics(vae, images.device, torch.float32)
        latents = most_likely(vae.encode(images[:, :, None], return_dict=False)[0]).float()
        return ((latents - mean) / std)[:, :, 0]


class Positions(nn.Module):
    """Diffusers' `QwenEmbedRope` for images, computed anew in each pass.

    Its tables could not leave the meta device, and tables made in inference mode could not be trained with.
    """

    def __init__(self, axes: Sequence[int]) -> None:
        super().__init__()
        self.axes = tuple(axes)

    def forward(
        self, sizes: Sequence[Sequence[tuple[int, int, int]]], max_txt_seq_len: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Rotations of image tokens [S, D / 2] and of text tokens [T, D / 2], as complex numbers of length 1.

        Args:
            sizes: one list for each image, which are all of one size: (1, rows, columns) of its patches.
            max_txt_seq_len: T.
            device: device of the result.
        """
        _, rows, columns = sizes[0][0]
        image = torch.cartesian_prod(
            torch.arange(1, device=device),
            torch.arange(rows, device=device) - (rows - rows // 2),
            torch.arange(columns, device=device) - (columns - columns // 2),
        )
        text = torch.arange(max_txt_seq_len, device=device)[:, None].expand(-1, 3) + max(rows // 2, columns // 2)
        return self._turns(image), self._turns(text)

    def _turns(self, positions: Tensor) -> Tensor:
        """Rotations [N, D / 2] of positions [N, 3] along time, rows and columns."""
        angles = []
        for axis, size in enumerate(self.axes):
            halves = torch.arange(0, size, 2, device=positions.device, dtype=torch.float32) / size
            angles.append(torch.outer(positions[:, axis].float(), 1 / torch.pow(_THETA, halves)))
        angle = torch.cat(angles, 1)
        return torch.polar(torch.ones_like(angle), angle)


_MASKED = -10000.0
"""Added to the logits of padding; its weight in a softmax is then exactly 0."""


def real_angles(turns: tuple[Tensor, Tensor]) -> Angles:
    """The angles of complex rotations of image tokens and of text tokens."""
    image, text = turns
    joint = torch.cat([text, image])
    return joint.real.contiguous(), joint.imag.contiguous()


class QwenFusedBlock(FusedBlock):
    """Fused `QwenImageTransformerBlock` of diffusers; takes real angles."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None,
        temb: Tensor,
        image_rotary_emb: Angles,
        joint_attention_kwargs: dict[str, Any] | None = None,
        modulate_index: None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return text tokens [B, T, C] and image tokens [B, S, C]; the mask [B, T] is False at padding."""
        x, text = hidden_states, encoder_hidden_states
        shift, scale, gate, *feed_forward_modulation = self.img_mod(temb).chunk(6, 1)
        text_shift, text_scale, text_gate, *text_rest = self.txt_mod(temb).chunk(6, 1)
        image_in = modulate(x, self.img_norm1, scale, shift, image_layers(self.attn))
        text_in = modulate(text, self.txt_norm1, text_scale, text_shift, text_layers(self.attn))
        if encoder_hidden_states_mask is None:  # diffusers 0.38 gives [B, 1, 1, T + S] here instead
            assert joint_attention_kwargs is not None
            encoder_hidden_states_mask = joint_attention_kwargs["attention_mask"][:, 0, 0, : text.shape[1]]
        mask = F.pad((~encoder_hidden_states_mask).to(x.dtype) * _MASKED, (0, x.shape[1]))[:, None, None]
        out, text_out = joint_attention(self.attn, image_in, text_in, image_rotary_emb, mask)
        x = add_and_feed_forward(x, out, gate, self.img_norm2, feed_forward_modulation, self.img_mlp)
        return add_and_feed_forward(text, text_out, text_gate, self.txt_norm2, text_rest, self.txt_mlp), x
