"""Base class of the families: all that sampler, algorithms and service use of a loaded diffusers pipeline."""

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from solrl_core.families.backbone import Conditioning, PromptCache, stack
from solrl_core.families.decoder_fused import decodes_images, fused_decoder, has_decoder_kernels
from solrl_core.model_options import MODELS_OWN, ImageSize, ModelOptions
from solrl_core.precision.fuse import fuse_feed_forwards
from solrl_core.precision.layer_policy import LayerPolicy, linear_flops, share_of_flops

Predict = Callable[[Tensor, Tensor, Conditioning], Tensor]
"""(latents [B, ...], sigma [B], conditioning) → velocity [B, ...] float32."""

_LISTS = (nn.ModuleList, nn.Sequential)

# Optional parts of a pipeline that plain text-to-image never uses.
_UNUSED = ("image_encoder", "feature_extractor")


class PipelineBackbone(ABC):
    """A text-to-image flow model with the parts of a diffusers pipeline.

    Attributes:
        family: registered name, e.g. "sana".
        name: the model's name in requests.
        transformer: the clean base. A `Generator` copies it and never modifies it.
        device: device of all parts.
        dtype: dtype of the transformer's arithmetic.
        height: default height of an image in pixels.
        width: default width of an image in pixels.
        frames: frames of a sample: 1 for an image, more for a clip.
        frame_step: frames of a clip for each further one of its latents [C, T, ...]; 0 for a family of images.
        lora_targets: regular expression that matches the whole dotted name of each module that LoRA adapts.
        policy: layers to quantise at nvfp4.
        fp8_policy: layers to quantise at fp8.
        blocks: names of the transformer's lists of blocks, in the order that they run in; the quantised share is
            relative to their FLOPs.
        one_length: whether all prompts have equally many tokens. If not, blocks compile for the first number and then
            for any.
        parts: the parts that digests cover, by name.
        quantize: patterns of the family's `LayerPolicy` at nvfp4; the model's options override it.
        keep: patterns of the same policy.
        keep_max_dim: limit of the same policy.
        max_sequence_length: the family's number of text tokens; the model's options override it.
        size: the family's default size; None in it for what the transformer's configuration says.
        patch: latent pixels along the side of one image token; 0 for what the transformer's configuration says.
        guided: whether guidance above 1 is classifier-free; otherwise the model ignores it.
        own_schedule: whether the pipeline's scheduler gives the noise levels; otherwise they are evenly spaced.
        file_encoders: names of the text encoders in single-file checkpoints, in the pipeline's order.
    """

    family: str
    frame_step: int = 0
    lora_targets: str
    fp8_policy: LayerPolicy
    blocks: tuple[str, ...] = ("transformer_blocks",)
    one_length: bool = True
    quantize: tuple[str, ...]
    keep: tuple[str, ...]
    keep_max_dim: int = 0
    max_sequence_length: int
    size: ImageSize = MODELS_OWN
    patch: int = 0
    guided: bool = True
    own_schedule: bool = True
    file_encoders: tuple[str, ...] = ()

    def __init__(self, pipeline: Any, name: str, options: ModelOptions) -> None:
        self.name = name
        self.options = options
        self._pipeline = pipeline
        self.transformer: nn.Module = pipeline.transformer
        self._vae: Any = pipeline.vae
        self._config = pipeline.transformer.config
        weight = next(self.transformer.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        if decodes_images(pipeline.vae):
            # There is no such layout for videos.
            pipeline.vae.to(memory_format=torch.channels_last)  # convolutions are faster, on CPUs too
        self._scale: int = getattr(pipeline, "vae_scale_factor", None) or pipeline.vae_scale_factor_spatial
        default_size = self.own_size(self._config)
        self.height = options.height or default_size.height or self._config.sample_size * self._scale
        self.width = options.width or default_size.width or self._config.sample_size * self._scale
        self.frames = options.frames or default_size.frames or 1
        if self.frames > 1 and not self.frame_step:
            raise ValueError(f"got clips of {self.frames} frames; {name} makes images: omit frames")
        if self.frame_step and (self.frames - 1) % self.frame_step:
            raise ValueError(
                f"got clips of {self.frames} frames; {name} needs 1 more than a multiple of {self.frame_step}, such as "
                f"{8 * self.frame_step + 1}"
            )
        multiple = self._scale * self._patch_size
        if self.height % multiple or self.width % multiple:
            raise ValueError(
                f"got images of {self.width}×{self.height} px; {name} needs multiples of {multiple} px: set another "
                "height and width"
            )
        self.policy = LayerPolicy(
            quantize=self.quantize if options.quantize is None else options.quantize,
            keep=self.keep if options.keep is None else options.keep,
            keep_max_dim=self.keep_max_dim if options.keep_max_dim is None else options.keep_max_dim,
        )
        self.parts: Mapping[str, Any] = {
            part: component
            for part, component in pipeline.components.items()
            if component is not None and part not in _UNUSED
        }
        if options.max_sequence_length is not None:
            self.max_sequence_length = options.max_sequence_length

    @classmethod
    def pipeline_call(cls, options: ModelOptions, config: Mapping[str, Any], guidance: float) -> dict[str, Any]:
        """Arguments that make the diffusers pipeline generate as this family does, in addition to prompt and steps.

        They follow from the model's own settings, its transformer's configuration, and guidance in this family's form.
        """
        default_size = cls.own_size(config)
        sizes = {"height": options.height or default_size.height, "width": options.width or default_size.width}
        size = {name: value for name, value in sizes.items() if value is not None}
        length = options.max_sequence_length or cls.max_sequence_length
        return {"guidance_scale": guidance, **size, "max_sequence_length": length}

    @property
    def pipeline_arguments(self) -> dict[str, Any]:
        """`pipeline_call` of this model without guidance."""
        return self.pipeline_call(self.options, self._config, 1.0)

    @property
    def pipeline(self) -> Any:
        """The diffusers pipeline that the model was loaded with."""
        return self._pipeline

    @classmethod
    def own_size(cls, config: Mapping[str, Any]) -> ImageSize:
        """Default size for a transformer's configuration; None for what the configuration has."""
        return cls.size

    @property
    def text_encoders(self) -> dict[str, nn.Module]:
        """The parts that encode prompts, by name."""
        return {name: part for name, part in self.parts.items() if is_text_encoder(name)}

    def on_meta(self) -> Self:
        """The same model on the meta device, where tensors have shapes but no values."""
        parts = {
            name: meta_copy(part) if isinstance(part, nn.Module) else part
            for name, part in self._pipeline.components.items()
        }
        kind = type(self._pipeline)
        return type(self)(kind(**parts, **pipeline_settings(kind, self._pipeline.config)), self.name, self.options)

    def policy_at(self, precision: str) -> LayerPolicy:
        """Layer policy at "nvfp4" or "fp8"."""
        return self.fp8_policy if precision == "fp8" else self.policy

    def quantized_share(self, precision: str) -> float:
        """Share (0 to 1) of the blocks' linear FLOPs that are quantised at a precision."""
        if precision == "bf16":
            return 0.0
        return self.share_of(self.policy_at(precision).select(self.transformer))

    def share_of(self, layers: Collection[str]) -> float:
        """Share (0 to 1) of the blocks' linear FLOPs that the named layers spend."""
        return share_of_flops(self._flops, layers, self.blocks)

    @cached_property
    def _flops(self) -> dict[str, int]:
        """FLOPs of one forward pass for one candidate, by layer of the transformer."""
        conditioning = self.encode(["a"])
        latents = torch.zeros(1, *self.latent_shape, device=self.device)
        sigma = torch.ones(1, device=self.device)
        return linear_flops(self.transformer, lambda: self.velocity(self.transformer, latents, sigma, conditioning))

    @property
    def unused_lora_layers(self) -> str | None:
        """Regular expression of the whole dotted names of adapted layers whose output nothing uses; by default none.

        They get no gradient. Training refuses other layers without one.
        """
        return None

    @abstractmethod
    def sigmas(self, steps: int) -> list[float]:
        """Noise schedule of the family: `steps + 1` values from 1 to 0."""

    @abstractmethod
    def encode(self, prompts: Sequence[str], guidance: float = 1.0) -> Conditioning:
        """Encode prompts; for guidance above 1, include the embeddings that it needs."""

    def conditioning(self, prompt: str, guidance: float = 1.0) -> Conditioning:
        """Conditioning of one prompt, from the cache that all users of this backbone share.

        The encoding depends on neither precision nor adapter. Threads may share the backbone.
        """
        key = (prompt, max(guidance, 1.0))
        return self._prompts.get(key, lambda: self.encode([prompt], guidance))

    def stack(self, conditionings: Sequence[Conditioning]) -> Conditioning:
        """Conditioning of a batch, a row for each; equal rows may be views of one."""
        return stack(conditionings)

    def cache_at_least(self, prompts: int) -> None:
        """Keep the conditioning of the newest `prompts` prompts, even if the cache grows beyond its usual size."""
        self._prompts.least = prompts

    @cached_property
    def _prompts(self) -> PromptCache:
        return PromptCache()

    def truncated_tokens(self, prompts: Sequence[str]) -> list[int]:
        """Number of tokens of each prompt that all text encoders cut off: beyond the limit of the one that reads most.

        Prompts that differ only in the cut part give the same image.
        """
        beyond = []
        for name, tokenizer in self.parts.items():
            if name.startswith("tokenizer"):
                encoder = type(self.parts[name.replace("tokenizer", "text_encoder")]).__name__
                limit = tokenizer.model_max_length if encoder.startswith("CLIP") else self.max_sequence_length
                beyond.append([max(0, count - limit) for count in token_counts(tokenizer, prompts)])
        return [min(counts) for counts in zip(*beyond, strict=True)]

    @property
    def _patch_size(self) -> int:
        size: int = self.patch or self._config.patch_size
        return size

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Shape of one candidate's latents: (channels, height / f, width / f), f the autoencoder's downscaling."""
        config = self._pipeline.vae.config
        channels: int = config.get("z_dim") or config.latent_channels
        return channels, self.height // self._scale, self.width // self._scale

    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents [B, ...] to images [B, 3, H, W], or clips [B, F, 3, H, W]; float32 in [0, 1]."""
        return (self._decoded(self._vae, latents).float() / 2 + 0.5).clamp(0, 1)

    @torch.no_grad()
    def _decoded(self, vae: Any, latents: Tensor) -> Tensor:
        """Images or clips in [−1, 1] of latents."""
        config = self._pipeline.vae.config
        scaled = latents.to(self._pipeline.vae.dtype) / config.scaling_factor + (config.get("shift_factor") or 0)
        out: Tensor = vae.decode(scaled, return_dict=False)[0]
        return out

    @torch.no_grad()
    def encode_images(self, images: Tensor) -> Tensor:
        """Clean latents float32 [B, ...] of samples as `decode` makes them: the most likely ones of the autoencoder.

        The encoder computes in float32: BF16 is off by 0.3 to 0.4 % of the latents' deviation with the miniatures, and
        by 1.8 % with an encoder of FLUX.1's shape and random weights at 512 pixels.
        """
        vae = self._pipeline.vae if self._pipeline.vae.dtype == torch.float32 else self._float32_encoder
        # An encoder may leave channels last; the order of memory changes how sums are rounded.
        return self._encoded(vae, 2 * images - 1).contiguous()

    @cached_property
    def _float32_encoder(self) -> Any:
        """A copy of the autoencoder in float32, without its decoder."""
        vae = self._pipeline.vae
        return copy.deepcopy(vae, {id(vae.decoder): nn.Identity()}).float()

    def _encoded(self, vae: Any, images: Tensor) -> Tensor:
        """Latents of images in [−1, 1], the inverse of `_decoded`."""
        config = vae.config
        latents = most_likely(vae.encode(images, return_dict=False)[0]).float()
        scaled: Tensor = (latents - (config.get("shift_factor") or 0)) * config.scaling_factor
        return scaled

    def velocity(
        self, transformer: nn.Module, latents: Tensor, sigma: Tensor, conditioning: Conditioning, guidance: float = 1.0
    ) -> Tensor:
        """Velocity [B, ...] float32 that `transformer` predicts at (latents [B, ...], sigma [B]); differentiable.

        From one pass of `predict`, or two in one batch with classifier-free guidance against the empty prompt, whose
        tensors in `conditioning` have the prefix `negative_`.

        Source: Ho & Salimans, arXiv 2207.12598.
        """
        predict = partial(self.predict, transformer)
        if guidance <= 1 or not self.guided:
            return predict(latents, sigma, conditioning)
        without, towards = both_predictions(predict, latents, sigma, conditioning)
        return without + guidance * (towards - without)

    def predict(self, transformer: nn.Module, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """Velocity [B, ...] float32 without guidance, for latents [B, ...] at sigma [B]; what `velocity` calls."""
        raise NotImplementedError

    def compile(self, transformer: nn.Module) -> None:
        """Compile a generator's transformer and the decoder for a GPU, in place, with fused modules."""
        self.fuse(transformer)
        self.compile_blocks(transformer)
        self.compile_decoder()

    def compile_blocks(self, transformer: nn.Module) -> None:
        """Compile the blocks of a transformer, in place. Each batch size compiles on its first call."""
        _raise_recompile_limit()
        for name in self.blocks:
            for block in transformer.get_submodule(name).children():
                block.compile(dynamic=False if self.one_length else None)

    def compile_decoder(self) -> None:
        """Decode by fused modules from now on, where a GPU has kernels for them, and compile the decoder's blocks."""
        if not self._decodes_images():
            return
        vae = self._vae
        if vae is self._pipeline.vae and has_decoder_kernels(vae):
            vae = self.with_fused_decoder()
        _raise_recompile_limit()
        last_norms = [part for name, part in vae.decoder.named_children() if name in ("conv_norm_out", "norm_out")]
        for block in (*listed_blocks(vae.decoder), *last_norms):
            if block._compiled_call_impl is None:
                block.compile(dynamic=False)
        self._vae = vae

    def with_fused_decoder(self) -> Any:
        """The autoencoder with fused modules in its decoder, which pack some weights again and share the rest."""
        vae = self._pipeline.vae
        return fused_decoder(vae) if self._decodes_images() else vae

    def _decodes_images(self) -> bool:
        return getattr(self._pipeline.vae, "decoder", None) is not None and decodes_images(self._pipeline.vae)

    def fuse(self, transformer: nn.Module) -> None:
        """Replace modules by fused versions for a GPU, in place. Results are equal up to rounding."""
        fuse_feed_forwards(transformer)

    @property
    def _rotates_by_kernel(self) -> bool:
        """Whether the size of an attention head is a power of two, as the rotary kernel needs it."""
        head: int = self._config.attention_head_dim
        return head.bit_count() == 1

    def _flow_match_sigmas(
        self, steps: int, unshifted: list[float] | None = None, mu: float | None = None
    ) -> list[float]:
        """`steps + 1` sigmas of the pipeline's FlowMatchEulerDiscreteScheduler at the default size.

        `unshifted` are the `steps` sigmas before any shift, None for the scheduler's own; `mu` is the logarithm of a
        dynamic shift, None for that of the number of image tokens.
        """
        from diffusers import FlowMatchEulerDiscreteScheduler
        from diffusers.pipelines.flux.pipeline_flux import calculate_shift

        # Setting the steps modifies a scheduler, and threads may share this backbone: create a new one.
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(self._pipeline.scheduler.config)
        config = scheduler.config
        if mu is None:
            _, height, width = self.latent_shape
            tokens = (height // self._patch_size) * (width // self._patch_size)
            # Only schedulers with dynamic shifting use it.
            mu = calculate_shift(
                tokens, config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
            )
        scheduler.set_timesteps(steps, sigmas=unshifted, mu=mu)
        sigmas: list[float] = scheduler.sigmas.tolist()
        return sigmas


def _raise_recompile_limit() -> None:
    """Let torch compile blocks as often as needed: all of a kind share one code object, for each precision and size."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)


def most_likely(encoded: Any) -> Tensor:
    """Latents that an autoencoder gives, or the mode of their distribution."""
    latents: Tensor = encoded if isinstance(encoded, Tensor) else encoded.mode()
    return latents


def channel_statistics(vae: Any, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Mean and standard deviation of each channel of the latents of an autoencoder of videos, [C, 1, 1, 1]."""
    return tuple(
        torch.tensor(values, device=device, dtype=dtype).view(-1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )


def pipeline_settings(kind: type[Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a pipeline's class that are no parts, such as FLUX.2's `is_distilled`, from its configuration."""
    arguments = {name: config[name] for name in inspect.signature(kind).parameters if name in config}
    return {name: value for name, value in arguments.items() if not isinstance(value, list | tuple)}


def is_text_encoder(part: str) -> bool:
    """Whether the part of a pipeline with this name encodes prompts."""
    return part.startswith("text_encoder")


def replace_children(parent: nn.Module, replacement: Callable[[nn.Module], nn.Module]) -> None:
    """Replace each child of a module by its replacement."""
    for name, child in list(parent.named_children()):
        setattr(parent, name, replacement(child))


def meta_copy(module: nn.Module) -> nn.Module:
    """A copy of a module on the meta device."""
    memo: dict[int, Any] = {
        id(weight): nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)
        for weight in module.parameters()
    }
    memo |= {id(buffer): torch.empty_like(buffer, device="meta") for buffer in module.buffers()}
    return copy.deepcopy(module, memo)


def token_counts(tokenizer: Any, texts: Sequence[str]) -> list[int]:
    """Tokens of each text, special ones included."""
    return list(map(len, tokenizer(list(texts), truncation=False, padding=False, verbose=False)["input_ids"]))


def listed_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Blocks in a module's (nested) lists. Compiling these few kinds is faster than compiling the whole as one graph.

    Modules outside lists are not blocks. Neither is attention, which contains a list itself.
    """
    for child in module.children():
        if isinstance(child, _LISTS) or any(isinstance(part, _LISTS) for part in child.children()):
            yield from listed_blocks(child)
        elif isinstance(module, _LISTS) and any(True for _ in child.children()):
            yield child


def both_predictions(
    predict: Predict, latents: Tensor, sigma: Tensor, conditioning: Conditioning
) -> tuple[Tensor, Tensor]:
    """Predictions without and with the prompt, from one batch; see `PipelineBackbone.velocity`."""
    prompt = {name: tensor for name, tensor in conditioning.items() if not name.startswith("negative_")}
    conditionings = {name: torch.cat([conditioning[f"negative_{name}"], tensor]) for name, tensor in prompt.items()}
    without, towards = predict(torch.cat([latents, latents]), torch.cat([sigma, sigma]), conditionings).chunk(2)
    return without, towards
