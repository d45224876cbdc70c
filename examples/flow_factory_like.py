"""A loop in the manner of Flow-Factory; a rollout service finds its seeds.

Its stages have Flow-Factory's names: `sample`, `prepare_feedback`, `optimize`. Pipeline, reward and loss are the
trainer's own; of solrl it needs solrl-client alone. Start the service in this folder, then the loop:

    solrl-rollout serve --model mini-sd3 --rewards colours:redness
    python flow_factory_like.py --model mini-sd3
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from colours import redness
from sd3_lora import Sd3Lora, main


@contextmanager
def starting_from(pipeline: Any, seeds: Sequence[int]) -> Iterator[None]:
    """Have a diffusers pipeline start from the seeds' noise, within the block.

    Noise is drawn in float32 on the CPU: another device draws other noise from the same seeds, and another dtype may.
    The pipeline packs it as its own. Flow-Factory's adapters call the same method, of `trainer.adapter.pipeline`.
    """
    original = pipeline.prepare_latents

    def prepare_latents(batch: int, channels: int, height: int, width: int, dtype: Any, device: Any, *_: Any) -> Any:
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        noise = original(batch, channels, height, width, torch.float32, device, generators)
        return (noise[0].to(dtype), *noise[1:]) if isinstance(noise, tuple) else noise.to(dtype)

    pipeline.prepare_latents = prepare_latents
    try:
        yield
    finally:
        del pipeline.prepare_latents


@dataclass
class Sample:
    """A generated image, and how it is trained on."""

    prompt: str
    seed: int
    latents: torch.Tensor
    image: torch.Tensor
    advantage: float = 0.0


class Trainer:
    """Trains a LoRA on the best and worst of many candidates.

    Args:
        lora: the LoRA, with its service.
        prompts: prompts of each epoch.
        group: candidates that are explored for a prompt.
        keep: candidates that are regenerated and trained on.
        steps: sampling steps of the regeneration.
    """

    def __init__(
        self, lora: Sd3Lora, prompts: Sequence[str], *, group: int = 48, keep: int = 8, steps: int = 10
    ) -> None:
        self.lora, self.prompts, self.group, self.keep, self.steps = lora, prompts, group, keep, steps

    def start(self, epochs: int) -> None:
        """Train."""
        for epoch in range(epochs):
            began = time.monotonic()
            samples = self.sample()
            reward, loss = self.prepare_feedback(samples), self.optimize(samples)
            took = time.monotonic() - began
            print(f"epoch {epoch + 1}: reward {reward:.4f}, loss {loss:.4f}, {took:.0f} s", flush=True)

    def sample(self) -> list[Sample]:
        """Explore at the service, and generate the best and worst seeds of each prompt here, with all steps."""
        seeds_by_prompt = self.lora.explore(self.prompts, self.group, self.keep)
        return [
            sample
            for text, seeds in zip(self.prompts, seeds_by_prompt, strict=True)
            for sample in self.inference(text, seeds)
        ]

    @torch.no_grad()
    def inference(self, text: str, seeds: Sequence[int]) -> list[Sample]:
        """Images of one prompt, by the trainer's own pipeline."""
        call = {"num_inference_steps": self.steps, "output_type": "latent", **self.lora.hosted.pipeline_call}
        with starting_from(self.lora.pipeline, seeds):
            latents = self.lora.pipeline([text] * len(seeds), **call).images
        return [Sample(text, *of) for of in zip(seeds, latents, self.lora.decode(latents), strict=True)]

    def prepare_feedback(self, samples: Sequence[Sample]) -> float:
        """Score the images with the trainer's own reward; each advantage is relative to its group. Returns the mean."""
        rewards = redness(torch.stack([sample.image for sample in samples]), [], []).reshape(-1, self.keep)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
        for sample, advantage in zip(samples, advantages.ravel().tolist(), strict=True):
            sample.advantage = advantage
        return rewards.mean().item()

    def optimize(self, samples: Sequence[Sample]) -> float:
        """One step on all samples; returns the loss."""
        latents = torch.stack([sample.latents for sample in samples])
        advantages = torch.tensor([sample.advantage for sample in samples])
        return self.lora.train([sample.prompt for sample in samples], latents, advantages)


if __name__ == "__main__":
    main("Flow-Factory", lambda lora, rounds: Trainer(lora, ["a red circle", "two blue squares"]).start(rounds))
