"""FLUX.2 [klein]: Qwen3 text encoder, double- and single-stream blocks with shared modulation, 32-channel VAE.

Source: Black Forest Labs, FLUX.2, through diffusers.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from solrl_core.families.backbone import Conditioning
from solrl_core.families.flux import PATCH
from solrl_core.families.flux_fused import Angles, joint_attention, once_a_pair, rotated
from solrl_core.families.pipeline import PipelineBackbone, most_likely, replace_children, token_counts
from solrl_core.kernels.attention import attend
from solrl_core.model_options import ImageSize, ModelOptions
from solrl_core.precision.fp8 import Fp8Linear
from solrl_core.precision.fuse import FusedBlock, Mapped, add_and_feed_forward, image_layers, modulate, text_layers
from solrl_core.precision.layer_policy import LayerPolicy


class Flux2Klein(PipelineBackbone):
    """A FLUX.2 [klein] pipeline loaded through diffusers.

    Latents are [B, 128, H/16, W/16]: 2×2 patches of the autoencoder's latents, normalised by its batch norm.
    Guidance is classifier-free; the distilled variant ignores it, as its pipeline does.
    """

    family = "flux2-klein"
    size = ImageSize(512, 512)  # UniRL's size; its configuration gives none.
    patch = PATCH
    blocks = ("transformer_blocks", "single_transformer_blocks")
    max_sequence_length = 512
    # Flow-Factory's and UniRL's: of a single-stream block, all but the last layer.
    lora_targets = (
        r"transformer_blocks\.\d+\.(attn\.(add_[qkv]_proj|to_add_out|to_[qkv]|to_out\.0)|ff(_context)?\.linear_(in|out))"
        r"|single_transformer_blocks\.\d+\.attn\.to_qkv_mlp_proj"
    )
    quantize = (r"^(single_)?transformer_blocks\.",)
    keep = ()
    fp8_policy = LayerPolicy(quantize=quantize)

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """(channels of a patch, height / 16, width / 16)."""
        side = self._scale * PATCH
        return self._config.in_channels, self.height // side, self.width // side

    def __init__(self, pipeline: Any, name: str, options: ModelOptions) -> None:
        super().__init__(pipeline, name, options)
        self.guided = not pipeline.config.is_distilled

    def sigmas(self, steps: int) -> list[float]:
        """Schedule of the pipeline, whose shift depends on the number of image tokens and of steps."""
        from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

        unshifted = torch.linspace(1, 1 / steps, steps, dtype=torch.float64).tolist()
        _, rows, columns = self.latent_shape
        return self._flow_match_sigmas(steps, unshifted, compute_empirical_mu(rows * columns, steps))

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], guidance: float = 1.0) -> Conditioning:
        """States of three of Qwen3's layers, at padding too; with guidance above 1, also the empty prompt's."""
        conditioning = {"states": self._states(prompts)}
        if guidance > 1 and self.guided:
            conditioning["negative_states"] = self._states([""] * len(prompts))
        return conditioning

    def _states(self, prompts: Sequence[str]) -> Tensor:
        states: Tensor = self._pipeline.encode_prompt(
            list(prompts), device=self.device, max_sequence_length=self.max_sequence_length
        )[0]
        return states

    def truncated_tokens(self, prompts: Sequence[str]) -> list[int]:
        """Tokens beyond the limit, which counts the chat template's tokens too."""
        tokenizer = self._pipeline.tokenizer

        def of_chat(text: str) -> str:
            message = [{"role": "user", "content": text}]
            chat: str = tokenizer.apply_chat_template(
                message, tokenize=False, add_generation_prompt=True, enable_thinking=False
            )
            return chat

        mark = "\0"
        after = token_counts(tokenizer, [of_chat(mark).partition(mark)[2]])[0]
        counts = token_counts(tokenizer, [of_chat(prompt) for prompt in prompts])
        return [max(0, count - after - self.max_sequence_length) for count in counts]

    def predict(self, transformer: nn.Module, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        rows, columns = latents.shape[-2:]
        states = conditioning["states"]
        out: Tensor = transformer(
            latents.flatten(2).mT.to(self.dtype),
            encoder_hidden_states=states.to(self.dtype),
            # Round at the same point as the pipeline.
            timestep=(sigma.to(self.device) * 1000).to(self.dtype) / 1000,
            img_ids=position_ids(1, rows, columns, 1, self.device),
            txt_ids=position_ids(1, 1, 1, states.shape[1], self.device),
            return_dict=False,
        )[0]
        return out.float().mT.reshape(len(out), -1, rows, columns)

    def fuse(self, transformer: nn.Module) -> None:
        """Swap in blocks that fuse norms with quantisation, and attention's norms with its position embedding."""
        if not self._rotates_by_kernel:
            return
        transformer.pos_embed = Mapped(transformer.get_submodule("pos_embed"), once_a_pair)
        for blocks, fused in zip(self.blocks, (Flux2FusedBlock, Flux2FusedSingleBlock), strict=True):
            replace_children(transformer.get_submodule(blocks), fused)

    @torch.no_grad()
    def _decoded(self, vae: Any, latents: Tensor) -> Tensor:
        """Decode latents after undoing the normalisation and the patches."""
        mean, variance = vae.bn.running_mean[:, None, None], vae.bn.running_var[:, None, None]
        patches = latents * torch.sqrt(variance + vae.config.batch_norm_eps).float() + mean.float()
        out: Tensor = vae.decode(F.pixel_shuffle(patches, PATCH).to(vae.dtype), return_dict=False)[0]
        return out

    def _encoded(self, vae: Any, images: Tensor) -> Tensor:
        mean, variance = vae.bn.running_mean[:, None, None], vae.bn.running_var[:, None, None]
        patches = F.pixel_unshuffle(most_likely(vae.encode(images, return_dict=False)[0]), PATCH)
        scaled: Tensor = (patches - mean.float()) / torch.sqrt(variance + vae.config.batch_norm_eps).float()
        return scaled


def position_ids(times: int, rows: int, columns: int, tokens: int, device: torch.device) -> Tensor:
    """Positions (time, row, column, text token), [times · rows · columns · tokens, 4]."""
    return torch.cartesian_prod(*(torch.arange(count, device=device) for count in (times, rows, columns, tokens)))


class Flux2FusedBlock(FusedBlock):
    """Fused `Flux2TransformerBlock` of diffusers."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb_mod_img: Tensor,
        temb_mod_txt: Tensor,
        image_rotary_emb: Angles,
        joint_attention_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return text tokens [B, T, C] and image tokens [B, S, C]; the modulations are [B, 6 · C]."""
        x, text = hidden_states, encoder_hidden_states
        shift, scale, gate, *feed_forward_modulation = temb_mod_img.chunk(6, 1)
        text_shift, text_scale, text_gate, *text_rest = temb_mod_txt.chunk(6, 1)
        image_in = modulate(x, self.norm1, scale, shift, image_layers(self.attn))
        text_in = modulate(text, self.norm1_context, text_scale, text_shift, text_layers(self.attn))
        out, text_out = joint_attention(self.attn, image_in, text_in, image_rotary_emb)
        x = add_and_feed_forward(x, out, gate, self.norm2, feed_forward_modulation, self.ff)
        return add_and_feed_forward(text, text_out, text_gate, self.norm2_context, text_rest, self.ff_context), x


class Flux2FusedSingleBlock(FusedBlock):
    """Fused `Flux2SingleTransformerBlock` of diffusers."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: None,
        temb_mod: Tensor,
        image_rotary_emb: Angles,
        joint_attention_kwargs: dict[str, Any] | None = None,
    ) -> Tensor:
        """Return text and image tokens [B, T + S, C]; the modulation is [B, 3 · C]."""
        x, attn = hidden_states, self.attn
        shift, scale, gate = temb_mod.chunk(3, 1)
        first: nn.Module = attn.to_qkv_mlp_proj
        wide = first(modulate(x, self.norm, scale, shift, [first]))
        q, k, v, mlp = wide.split([attn.inner_dim] * 3 + [wide.shape[-1] - 3 * attn.inner_dim], -1)
        query, key = rotated(attn, "q", image_rotary_emb, q), rotated(attn, "k", image_rotary_emb, k)
        attended = attend(query, key, v.unflatten(-1, query.shape[2:])).flatten(2)
        parts = [attended, attn.mlp_act_fn(mlp)]
        if isinstance(attn.to_out, Fp8Linear):
            out = attn.to_out.of_parts([(part, "") for part in parts])
        else:
            out = attn.to_out(torch.cat(parts, 2))
        return x + gate[:, None] * out
