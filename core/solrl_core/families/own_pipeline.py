"""Images or clips by a model's own diffusers pipeline, from the same noise and by the same schedule as here."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.sampling.noise import initial_noise
from solrl_core.sampling.sampler import unshifted_sigmas


def by_own_pipeline(
    backbone: PipelineBackbone,
    prompts: Sequence[str],
    seeds: Sequence[int],
    steps: int,
    guidance: float = 1.0,
    output_type: str = "pt",
    pipeline: Any = None,
) -> Tensor:
    """Samples as `Backbone.decode` gives them, or latents as the pipeline has them, by Euler steps.

    Args:
        backbone, prompts, seeds: the model, and a prompt and a seed for each sample.
        steps, guidance: solver steps, and guidance scale in the family's form.
        output_type: "pt" or "latent".
        pipeline: another pipeline of the same model; None for the one that the backbone was loaded with.
    """
    pipeline = backbone.pipeline if pipeline is None else pipeline
    call = backbone.pipeline_call(backbone.options, backbone.pipeline.transformer.config, guidance)
    call |= {"height": backbone.height, "width": backbone.width}
    if "negative_prompt" in call:
        call["negative_prompt"] = [call["negative_prompt"]] * len(prompts)
    if backbone.family == "sana":
        call["sigmas"] = unshifted_sigmas(steps)[:-1]
    pipeline.set_progress_bar_config(disable=True)
    noise = initial_noise(seeds, backbone.latent_shape).to(backbone.device, backbone.dtype)
    if backbone.family == "wan":
        return _clips(backbone, pipeline, noise, output_type, prompt=list(prompts), num_inference_steps=steps, **call)
    packs = backbone.family in ("flux", "qwen-image")
    images: Tensor = pipeline(
        prompt=list(prompts),  # some pipelines write into it
        num_inference_steps=steps,
        latents=pipeline._pack_latents(noise, *noise.shape) if packs else noise,
        output_type=output_type,
        **call,
    ).images
    return images


def _clips(backbone: PipelineBackbone, pipeline: Any, noise: Tensor, output_type: str, **call: Any) -> Tensor:
    """As `by_own_pipeline` of a pipeline that makes clips: it takes no noise levels, and its UniPC is no Euler."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    class EulerAtLevels(FlowMatchEulerDiscreteScheduler):  # type: ignore[misc]
        def set_timesteps(self, steps: int, device: Any = None) -> None:
            super().set_timesteps(device=device, sigmas=backbone.sigmas(steps)[:-1])

    euler_pipeline = type(pipeline)(**pipeline.components | {"scheduler": EulerAtLevels()})
    euler_pipeline.set_progress_bar_config(disable=True)
    call["num_frames"] = backbone.frames
    clips: Tensor = euler_pipeline(latents=noise, output_type=output_type, **call).frames
    return clips[:, 0] if output_type == "pt" and backbone.frames == 1 else clips
