"""The method in one file, after the recipe `fast`: explore at a rollout service, select, regenerate, train, push.

Trains a LoRA of an SD3 model with diffusers, PEFT and solrl-client; a miniature's name needs solrl, too.
The trained LoRA stays at the service, under the run's name. Start the service in this folder, then train:

    solrl-rollout serve --model mini-sd3 --rewards colours:redness
    python sol_rl_minimal.py --model mini-sd3
"""

import argparse
import sys
import time
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any
from uuid import uuid4

import torch
from colours import redness
from diffusers import StableDiffusion3Pipeline
from peft import LoraConfig
from solrl_client.adapter_file import adapter_file
from solrl_client.rollouts import RolloutClient
from solrl_proto.problems import ProblemError
from solrl_proto.rollouts import AdapterRef, Candidates, Plan, PromptItem, RewardSpec, RolloutGroup, RolloutRequest

MODEL = "mini-sd3"
PROMPTS = ("a red circle", "two blue squares", "a green cross", "a yellow triangle")
CANDIDATES, EXPLORING_STEPS = 24, 6
KEEP, STEPS = 4, 10
TRAINED_STEPS = 6
"""Number of the sampler's steps that each sample is trained at."""
RANK, ALPHA, LEARNING_RATE, WARMUP = 4, 8.0, 1e-3, 3
FIRST_BETA, LAST_BETA, BETA_ITERATIONS = 0.1, 1.0, 30
"""A small β lets the policy move far in the first iterations; it grows, so that the policy does not run away."""
CLIP = 5.0
OLD_DECAY = 0.4
"""Share of the behaviour policy that remains after an iteration."""
CURRENT, OLD = "default", "old"


class Model:
    """An SD3 pipeline with two LoRA: the trained policy, and the behaviour policy, which generates.

    Args:
        folder: the model's folder, in diffusers' layout.
        targets: modules that a LoRA adapts.
        call: arguments of the pipeline, as the service calls it.
    """

    def __init__(self, folder: str, targets: Sequence[str], call: dict[str, Any]) -> None:
        self.targets, self.call = list(targets), call
        self.pipeline = StableDiffusion3Pipeline.from_pretrained(folder, torch_dtype=torch.float32)
        self.pipeline.set_progress_bar_config(disable=True)
        self.transformer = self.pipeline.transformer.requires_grad_(False)
        for name in (CURRENT, OLD):
            self.transformer.add_adapter(LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=self.targets), name)
        with torch.no_grad():
            for parameter, follower in zip(self.weights(CURRENT), self.weights(OLD), strict=True):
                follower.copy_(parameter)

    def weights(self, policy: str) -> list[torch.nn.Parameter]:
        """LoRA weights of a policy."""
        named = self.transformer.named_parameters()
        return [weight for name, weight in named if f".lora_A.{policy}." in name or f".lora_B.{policy}." in name]

    def velocity(self, policy: str, x: torch.Tensor, t: torch.Tensor, text: Any) -> torch.Tensor:
        """Velocity of a policy at latents x with noise levels t."""
        self.transformer.set_adapter(policy)
        states, pooled = text
        return self.transformer(x, states, pooled, t * 1000).sample

    @torch.no_grad()
    def encode(self, texts: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Text states and pooled states of prompts."""
        length = self.call["max_sequence_length"]
        states, _, pooled, _ = self.pipeline.encode_prompt(
            list(texts), None, None, do_classifier_free_guidance=False, max_sequence_length=length
        )
        return states, pooled

    @torch.no_grad()
    def generate(self, text: str, seeds: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents and images [n, 3, H, W] of a prompt under the behaviour policy, from the service's own noise."""
        self.transformer.set_adapter(OLD)
        channels, (height, width) = self.transformer.config.in_channels, (self.call["height"], self.call["width"])
        scale = self.pipeline.vae_scale_factor
        shape = (1, channels, height // scale, width // scale)
        noise = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        latents = self.pipeline(
            [text] * len(seeds), num_inference_steps=STEPS, latents=torch.cat(noise), output_type="latent", **self.call
        ).images
        vae = self.pipeline.vae
        images = vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor).sample / 2 + 0.5
        return latents, images.clamp(0, 1)


def folder_of(model: str) -> str:
    """The folder of a miniature, by the name that the service takes; other models are folders or hub ids for both."""
    miniatures = [entry.load()() for entry in entry_points(group="solrl.models", name=model)]
    return str(miniatures[0]) if miniatures else model


def show(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def explore(client: RolloutClient, name: str, run: str, iteration: int) -> list[tuple[str, list[int]]]:
    """Have the service generate and score many candidates per prompt; select the seeds of the best and worst."""
    request = RolloutRequest(
        model=name,
        adapter=AdapterRef(run=run, version=iteration),
        prompts=tuple(PromptItem(id=str(place), text=text) for place, text in enumerate(PROMPTS)),
        candidates=Candidates(count=CANDIDATES, seed_root=iteration),
        plan=Plan(steps=EXPLORING_STEPS),
        rewards=(RewardSpec(name="colours:redness"),),
    )
    arrived: list[str] = []

    def on_group(group: RolloutGroup) -> None:
        arrived.append(group.prompt_id)
        show(f"iteration {iteration}: explored {len(arrived)} of {len(PROMPTS)} prompts, {CANDIDATES} images each")

    groups = client.rollouts(request, on_group=on_group).groups
    return [(text, group.best_worst(KEEP)) for text, group in zip(PROMPTS, groups, strict=True)]


def beta_of(iteration: int) -> float:
    """β of an iteration, from `FIRST_BETA` to `LAST_BETA` by a constant factor."""
    share = min(1.0, iteration / BETA_ITERATIONS)
    return float(FIRST_BETA ** (1 - share) * LAST_BETA**share)


def nft_loss(
    model: Model, x0: torch.Tensor, advantages: torch.Tensor, text: Any, t: torch.Tensor, beta: float
) -> torch.Tensor:
    """DiffusionNFT: pull an implicit positive policy towards good samples, a negative one towards bad ones."""
    level, noise = t.view(-1, 1, 1, 1), torch.randn_like(x0)
    x = (1 - level) * x0 + level * noise
    with torch.no_grad():
        old = model.velocity(OLD, x, t, text)
    current = model.velocity(CURRENT, x, t, text)

    def error(velocity: torch.Tensor) -> torch.Tensor:
        predicted = x - level * velocity
        weight = (predicted.detach() - x0).abs().mean((1, 2, 3), keepdim=True).clamp(min=1e-5)
        return ((predicted - x0).square() / weight).mean((1, 2, 3))

    positive = error(beta * current + (1 - beta) * old)
    negative = error((1 + beta) * old - beta * current)
    good = (advantages.clamp(-CLIP, CLIP) / (2 * CLIP) + 0.5).clamp(0, 1)
    return (good * positive + (1 - good) * negative).mean() * CLIP / beta


def train(
    model: Model, optimizer: torch.optim.Optimizer, latents: torch.Tensor, advantages: torch.Tensor, iteration: int
) -> float:
    """An optimiser step per group of [prompts, kept, …]; then the behaviour policy follows. Returns the mean loss."""
    states, pooled = model.encode(PROMPTS)
    sigmas = model.pipeline.scheduler.sigmas[:-1]
    optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (iteration + 1) / WARMUP)
    total = 0.0
    for place in torch.randperm(len(PROMPTS)).tolist():
        text = states[place].expand(KEEP, -1, -1), pooled[place].expand(KEEP, -1)
        for _ in range(TRAINED_STEPS):
            t = sigmas[torch.randint(len(sigmas), (KEEP,))]
            loss = nft_loss(model, latents[place], advantages[place], text, t, beta_of(iteration)) / TRAINED_STEPS
            loss.backward()
            total += loss.item() / len(PROMPTS)
        torch.nn.utils.clip_grad_norm_(model.weights(CURRENT), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for parameter, follower in zip(model.weights(CURRENT), model.weights(OLD), strict=True):
            follower.lerp_(parameter, 1 - OLD_DECAY)
    return total


def push(model: Model, client: RolloutClient, name: str, run: str, version: int) -> None:
    """Give the service the behaviour policy."""
    weights = dict(model.transformer.named_parameters())
    file = adapter_file(weights, model.targets, rank=RANK, alpha=ALPHA, adapter=OLD)
    client.push(run, version, version - 1 if version else None, name, file)


def sol_rl(folder: str, client: RolloutClient, name: str, run: str, iterations: int) -> list[float]:
    """Train; returns the mean reward of the regenerated samples of each iteration."""
    hosted = client.model(name)
    show(f"loading {folder}")
    model = Model(folder, hosted.lora_targets, dict(hosted.pipeline_call))
    optimizer = torch.optim.AdamW(model.weights(CURRENT), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=1e-4)
    push(model, client, name, run, 0)
    means = []
    for iteration in range(iterations):
        began = time.monotonic()
        selected = explore(client, name, run, iteration)
        show(f"iteration {iteration}: regenerating {len(PROMPTS) * KEEP} images, and training on them")
        samples = [model.generate(text, seeds) for text, seeds in selected]
        rewards = redness(torch.cat([images for _, images in samples]), [], []).reshape(len(PROMPTS), KEEP)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std() + 1e-4)
        loss = train(model, optimizer, torch.stack([latents for latents, _ in samples]), advantages, iteration)
        push(model, client, name, run, iteration + 1)
        means.append(rewards.mean().item())
        took = time.monotonic() - began
        show(f"iteration {iteration}: reward {means[-1]:.4f}, loss {loss:.4f}, {took:.0f} s")
    return means


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description="The method in one file.")
    parser.add_argument(
        "--model", default=MODEL, help="SD3 model: mini-sd3, a hub id, or a folder of diffusers' layout"
    )
    parser.add_argument("--name", help="its name at the service, by default the only one there")
    parser.add_argument("--run", default=f"sol-rl-minimal-{uuid4().hex[:8]}", help="a new run's name there")
    parser.add_argument("--url", default="http://127.0.0.1:8100", help="of the service")
    parser.add_argument("--iterations", type=int, default=10)
    args = parser.parse_args()
    with RolloutClient(args.url) as client:
        name = args.name or client.models().models[0].name
        sol_rl(folder_of(args.model), client, name, args.run, args.iterations)


if __name__ == "__main__":
    try:
        main()
    except (ProblemError, OSError) as error:  # such as a run of that name, from an earlier start, or no such model
        sys.exit(str(error))
