"""A LoRA of SD3 by diffusers and PEFT, and its run at a service, for the examples of other trainers' loops."""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from uuid import uuid4

import torch
from diffusers import StableDiffusion3Pipeline
from peft import LoraConfig
from solrl_client.adapter_file import adapter_file
from solrl_client.rollouts import RolloutClient
from solrl_proto.problems import ProblemError
from solrl_proto.rollouts import AdapterRef, Candidates, Plan, PromptItem, RewardSpec, RolloutGroup, RolloutRequest

MODEL = "mini-sd3"
RANK, ALPHA = 4, 8.0


class Sd3Lora:
    """An SD3 pipeline with a LoRA in training, whose versions a rollout service explores with.

    Args:
        folder: the model's folder, in diffusers' layout.
        client: client of a service with this model.
        name: the model's name at the service.
        run: name of the run at the service, a new one.
    """

    def __init__(self, folder: str, client: RolloutClient, name: str, run: str) -> None:
        self.client, self.hosted, self.run, self.version = client, client.model(name), run, 0
        self.pipeline = StableDiffusion3Pipeline.from_pretrained(folder, torch_dtype=torch.float32)
        self.pipeline.set_progress_bar_config(disable=True)
        self.transformer = self.pipeline.transformer.requires_grad_(False)
        targets = list(self.hosted.lora_targets)
        self.transformer.add_adapter(LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets))
        weights = [weight for weight in self.transformer.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(weights, lr=1e-3)
        self.push(parent=None)

    def push(self, parent: int | None) -> None:
        """Push the weights that the service explores with next."""
        weights = dict(self.transformer.named_parameters())
        file = adapter_file(weights, self.hosted.lora_targets, rank=RANK, alpha=ALPHA)
        self.client.push(self.run, self.version, parent, self.hosted.name, file)

    def explore(self, prompts: Sequence[str], candidates: int, keep: int) -> list[list[int]]:
        """Have the service generate and score candidates of each prompt; the seeds of the best and worst `keep`."""
        request = RolloutRequest(
            model=self.hosted.name,
            adapter=AdapterRef(run=self.run, version=self.version),
            prompts=tuple(PromptItem(id=str(i), text=text) for i, text in enumerate(prompts)),
            candidates=Candidates(count=candidates, seed_root=self.version),
            plan=Plan(steps=6),
            rewards=(RewardSpec(name="colours:redness"),),
        )
        arrived: list[str] = []

        def progress(group: RolloutGroup) -> None:
            arrived.append(group.prompt_id)
            print(f"explored {len(arrived)} of {len(prompts)} prompts, {candidates} images each", flush=True)

        groups = self.client.rollouts(request, on_group=progress).groups
        print(f"regenerating {len(groups) * keep} images, and training on them", flush=True)
        return [group.best_worst(keep) for group in groups]

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Images [N, 3, H, W] of latents [N, C, h, w]."""
        vae = self.pipeline.vae
        images = vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor).sample / 2 + 0.5
        return images.clamp(0, 1)

    def train(self, texts: Sequence[str], clean: torch.Tensor, advantages: torch.Tensor) -> float:
        """One step of flow matching on latents [N, C, h, w], weighted by their advantages [N], and push the version.

        Your loss belongs here. Returns its value.
        """
        states, _, pooled, _ = self.pipeline.encode_prompt(
            list(texts),
            None,
            None,
            do_classifier_free_guidance=False,
            max_sequence_length=self.hosted.pipeline_call["max_sequence_length"],
        )
        noise, sigma = torch.randn_like(clean), torch.rand(len(clean))
        level = sigma.view(-1, 1, 1, 1)
        velocity = self.transformer((1 - level) * clean + level * noise, states, pooled, sigma * 1000).sample
        loss = (advantages * (velocity - (noise - clean)).square().mean((1, 2, 3))).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.version += 1
        self.push(parent=self.version - 1)
        return loss.item()


def folder_of(model: str) -> str:
    """The folder of a miniature, by the name that the service takes; other models are folders or hub ids for both."""
    folders = [entry.load()() for entry in entry_points(group="solrl.models", name=model)]
    return str(folders[0]) if folders else model


def main(trainer: str, run: Callable[[Sd3Lora, int], None]) -> None:
    """Train as the command line says: `run` takes the LoRA and the number of rounds."""
    parser = argparse.ArgumentParser(description=f"A loop in the manner of {trainer}.")
    parser.add_argument(
        "--model", default=MODEL, help="SD3 model: mini-sd3, a hub id, or a folder of diffusers' layout"
    )
    parser.add_argument("--name", help="its name at the service, by default the only one there")
    parser.add_argument("--run", default=f"{trainer.lower()}-like-{uuid4().hex[:8]}", help="a new run's name there")
    parser.add_argument("--url", default="http://127.0.0.1:8100", help="of the service")
    parser.add_argument("--rounds", type=int, default=3, help="of exploring and training")
    arguments = parser.parse_args()
    try:
        with RolloutClient(arguments.url) as client:
            name = arguments.name or client.models().models[0].name
            run(Sd3Lora(folder_of(arguments.model), client, name, arguments.run), arguments.rounds)
    except (ProblemError, OSError) as error:  # such as a run of that name, from an earlier start, or no such model
        sys.exit(str(error))
