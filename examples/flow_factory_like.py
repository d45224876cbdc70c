"""A loop in the manner of Flow-Factory, for which a rollout service finds the seeds.

Its stages have Flow-Factory's names: `sample`, `prepare_feedback`, `optimize`. Pipeline, reward and loss are the
trainer's own; of solrl it needs solrl-client alone. Start the service in this folder, then the loop:

    solrl-rollout serve --model MODEL --rewards colours:redness
    python flow_factory_like.py --model MODEL
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import torch
from colours import redness
from diffusers import StableDiffusion3Pipeline
from peft import LoraConfig
from solrl_client.adapter_file import adapter_file
from solrl_client.rollouts import RolloutClient
from solrl_proto import AdapterRef, Candidates, Plan, PromptItem, RewardSpec, RolloutRequest
from solrl_proto.problems import ProblemError

RANK, ALPHA = 4, 8.0


@contextmanager
def starting_from(pipeline: Any, seeds: Sequence[int]) -> Iterator[None]:
    """Have a diffusers pipeline start from the seeds' noise, within the block.

    Noise is drawn in float32 on the CPU: another device draws other noise from the same seeds, and another dtype may.
    The pipeline packs it as its own. Flow-Factory's adapters call the same method, of `trainer.adapter.pipeline`.
    """
    own = pipeline.prepare_latents

    def prepare_latents(batch: int, channels: int, height: int, width: int, dtype: Any, device: Any, *_: Any) -> Any:
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        found = own(batch, channels, height, width, torch.float32, device, generators)
        return (found[0].to(dtype), *found[1:]) if isinstance(found, tuple) else found.to(dtype)

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
    """Trains a LoRA of SD3 on the best and worst of many candidates.

    Args:
        folder: of the model, in diffusers' layout.
        client: client of a service with this model.
        name: the model's name at the service.
        prompts: of each epoch.
        group: candidates that are explored for a prompt.
        keep: those that are regenerated and trained on.
        steps: of the regeneration.
        run: name of the run at the service, a new one.
    """

    def __init__(
        self,
        folder: str,
        client: RolloutClient,
        name: str,
        prompts: Sequence[str],
        *,
        group: int = 48,
        keep: int = 8,
        steps: int = 10,
        run: str,
    ) -> None:
        self.client, self.hosted, self.run = client, client.model(name), run
        self.call = self.hosted.pipeline_call
        self.prompts, self.group, self.keep, self.steps = list(prompts), group, keep, steps
        self.pipeline = StableDiffusion3Pipeline.from_pretrained(folder, torch_dtype=torch.float32)
        self.pipeline.set_progress_bar_config(disable=True)
        self.transformer = self.pipeline.transformer.requires_grad_(False)
        self.transformer.add_adapter(
            LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(self.hosted.lora_targets))
        )
        weights = [weight for weight in self.transformer.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(weights, lr=1e-3)
        self.epoch = 0

    def start(self, epochs: int) -> None:
        """Train."""
        self.push(parent=None)
        while self.epoch < epochs:
            samples = self.sample()
            self.prepare_feedback(samples)
            loss = self.optimize(samples)
            self.epoch += 1
            self.push(parent=self.epoch - 1)
            print(f"epoch {self.epoch}: loss {loss:.4f}")

    def push(self, parent: int | None) -> None:
        """Give the service the weights under which it explores next."""
        weights = dict(self.transformer.named_parameters())
        file = adapter_file(weights, self.hosted.lora_targets, rank=RANK, alpha=ALPHA)
        self.client.push(self.run, self.epoch, parent, self.hosted.name, file)

    def sample(self) -> list[Sample]:
        """Explore at the service, and generate the best and worst seeds of each prompt here, with all steps."""
        request = RolloutRequest(
            model=self.hosted.name,
            adapter=AdapterRef(run=self.run, version=self.epoch),
            prompts=tuple(PromptItem(id=str(i), text=text) for i, text in enumerate(self.prompts)),
            candidates=Candidates(count=self.group, seed_root=self.epoch),
            plan=Plan(steps=6),
            rewards=(RewardSpec(name="colours:redness"),),
        )
        groups = self.client.rollouts(request).groups
        kept = [(text, group.best_worst(self.keep)) for text, group in zip(self.prompts, groups, strict=True)]
        return [sample for text, seeds in kept for sample in self.inference(text, seeds)]

    @torch.no_grad()
    def inference(self, text: str, seeds: Sequence[int]) -> list[Sample]:
        """Images of one prompt, by the trainer's own pipeline."""
        with starting_from(self.pipeline, seeds):
            latents = self.pipeline(
                [text] * len(seeds),
                num_inference_steps=self.steps,
                output_type="latent",
                **self.call,
            ).images
        vae = self.pipeline.vae
        images = vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor).sample / 2 + 0.5
        return [Sample(text, *of) for of in zip(seeds, latents, images.clamp(0, 1), strict=True)]

    def prepare_feedback(self, samples: Sequence[Sample]) -> None:
        """Score the images with the trainer's own reward; each advantage is relative to its group."""
        rewards = redness(torch.stack([sample.image for sample in samples]), [], []).reshape(-1, self.keep)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
        for sample, advantage in zip(samples, advantages.ravel().tolist(), strict=True):
            sample.advantage = advantage

    def optimize(self, samples: Sequence[Sample]) -> float:
        """One step: flow matching on the images, weighted by their advantages. Your algorithm belongs here."""
        latents = torch.stack([sample.latents for sample in samples])
        weight = torch.tensor([sample.advantage for sample in samples])
        texts = [sample.prompt for sample in samples]
        states, _, pooled, _ = self.pipeline.encode_prompt(
            texts, None, None, do_classifier_free_guidance=False, max_sequence_length=self.call["max_sequence_length"]
        )
        noise, sigma = torch.randn_like(latents), torch.rand(len(samples))
        level = sigma.view(-1, 1, 1, 1)
        noisy = (1 - level) * latents + level * noise
        velocity = self.transformer(noisy, states, pooled, sigma * 1000).sample
        loss = (weight * (velocity - (noise - latents)).square().mean((1, 2, 3))).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description="A loop in the manner of Flow-Factory.")
    parser.add_argument("--model", required=True, help="folder of an SD3 model in diffusers' layout")
    parser.add_argument("--name", help="its name at the service, by default the only one there")
    parser.add_argument("--run", default=f"flow-factory-like-{uuid4().hex[:8]}", help="a new run's name there")
    parser.add_argument("--url", default="http://127.0.0.1:8100", help="of the service")
    parser.add_argument("--epochs", type=int, default=3)
    given = parser.parse_args()
    with RolloutClient(given.url) as client:
        name = given.name or client.models().models[0].name
        Trainer(given.model, client, name, ["a red circle", "two blue squares"], run=given.run).start(given.epochs)


if __name__ == "__main__":
    try:
        main()
    except ProblemError as error:  # such as a run of that name, from an earlier start
        sys.exit(str(error))
