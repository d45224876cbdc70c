"""SANA: Gemma-2 text encoder, linear-attention transformer, DC-AE.

Source: Xie et al., arXiv 2410.10629; layer choices of Sol-RL, arXiv 2604.06916, in diffusers' names.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from solrl_core.families.backbone import Conditioning
from solrl_core.families.pipeline import PipelineBackbone, token_counts
from solrl_core.families.sana_fused import (
    FusedCrossAttention,
    FusedFeedForward,
    FusedLinearAttention,
    compute_equal_rows_once,
)
from solrl_core.model_options import ModelOptions
from solrl_core.precision.layer_policy import LayerPolicy
from solrl_core.sampling.sampler import unshifted_sigmas


class Sana(PipelineBackbone):
    """A SANA pipeline loaded through diffusers."""

    family = "sana"
    max_sequence_length = 300
    own_schedule = False
    lora_targets = r"transformer_blocks\.\d+\.attn[12]\.(to_q|to_k|to_v|to_out\.0)"
    # As in the paper, only the cross-attention keys and values (one larger fused layer in the authors' naming) and
    # the feed-forward are quantised. Everything outside the blocks stays in BF16.
    quantize = (r"^transformer_blocks\.",)
    keep = (r"attn1\.", r"attn2\.to_q$", r"attn2\.to_out\.0$")
    fp8_policy = LayerPolicy(quantize=(r"^transformer_blocks\.",))

    def fuse(self, transformer: nn.Module) -> None:
        """Swap in fused feed-forwards and attentions. Text layers compute equal rows once."""
        for name in ("caption_projection", "caption_norm"):
            compute_equal_rows_once(transformer.get_submodule(name))
        for block in transformer.get_submodule("transformer_blocks").children():
            block.ff = FusedFeedForward(block.get_submodule("ff"))
            block.attn1.set_processor(FusedLinearAttention())  # type: ignore[union-attr,operator]
            if block.attn2 is not None:
                block.attn2.set_processor(FusedCrossAttention())  # type: ignore[union-attr,operator]

    @classmethod
    def pipeline_call(cls, options: ModelOptions, config: Mapping[str, Any], guidance: float) -> dict[str, Any]:
        """Without the pipeline's own prompt prefix, and at exactly the size that is set."""
        call = super().pipeline_call(options, config, guidance)
        call["complex_human_instruction"] = options.complex_human_instruction or None
        return call | ({"use_resolution_binning": False} if "height" in call else {})

    def sigmas(self, steps: int) -> list[float]:
        """Schedule without a shift."""
        return unshifted_sigmas(steps)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], guidance: float = 1.0) -> Conditioning:
        """Gemma-2 states and masks; with guidance above 1, also the empty prompt's."""
        extra = {}
        if self.options.complex_human_instruction is not None:
            extra["complex_human_instruction"] = self.options.complex_human_instruction
        states, mask, negative_states, negative_mask = self._pipeline.encode_prompt(
            list(prompts),
            do_classifier_free_guidance=guidance > 1,
            device=self.device,
            max_sequence_length=self.max_sequence_length,
            **extra,
        )
        conditioning = {"states": states, "mask": mask}
        if guidance > 1:
            conditioning |= {"negative_states": negative_states, "negative_mask": negative_mask}
        return conditioning

    def stack(self, conditionings: Sequence[Conditioning]) -> Conditioning:
        """Conditioning of a batch. On a GPU, candidates of one prompt share a row, which fused layers compute once."""
        first, *further = conditionings
        if self.device.type != "cuda" or any(conditioning is not first for conditioning in further):
            return super().stack(conditionings)
        return {name: row.expand(len(conditionings), *row.shape[1:]) for name, row in first.items()}

    def truncated_tokens(self, prompts: Sequence[str]) -> list[int]:
        """Tokens beyond the limit, which does not count the instruction before the prompt."""
        tokenizer, instruction = self._pipeline.tokenizer, "\n".join(self.options.complex_human_instruction or [])
        limit = self.max_sequence_length
        if instruction:
            limit += token_counts(tokenizer, [instruction])[0] - 2  # as the pipeline counts
        texts = [instruction + prompt.lower().strip() for prompt in prompts]
        return [max(0, count - limit) for count in token_counts(tokenizer, texts)]

    def predict(self, transformer: nn.Module, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        scale: float = self._config.timestep_scale
        out: Tensor = transformer(
            latents.to(self.dtype),
            encoder_hidden_states=conditioning["states"].to(self.dtype),
            encoder_attention_mask=conditioning["mask"],
            timestep=sigma.to(self.device) * 1000 * scale,
            return_dict=False,
        )[0]
        return out.float()
