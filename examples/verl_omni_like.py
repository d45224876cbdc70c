"""A loop in the manner of verl-omni, for which a rollout service finds the seeds.

As there, a driver repeats the rows of a batch, an agent loop generates each of them at a generation server, and
advantages are relative to the rows of one `uid`. A row carries its seed to the agent loop, which makes the noise:
verl-omni's own servers would draw other noise from that seed, on their GPU. Of solrl it needs solrl-client alone. Start
the service in this folder, then the loop:

    solrl-rollout serve --model MODEL --rewards colours:redness
    python verl_omni_like.py --model MODEL
"""

import argparse
import asyncio
import sys
from collections.abc import Iterable, Sequence
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from colours import redness
from diffusers import StableDiffusion3Pipeline
from peft import LoraConfig, get_peft_model_state_dict
from solrl_client.adapter_file import adapter_file
from solrl_client.noise import initial_noise
from solrl_client.rollouts import RolloutClient
from solrl_proto import AdapterRef, Candidates, ModelInfo, Plan, PromptItem, RewardSpec, RolloutRequest
from solrl_proto.problems import ProblemError

RANK, ALPHA = 4, 8.0

Rows = dict[str, np.ndarray]
"""Columns of a batch, as `DataProto.non_tensor_batch` has them."""


class GenerationServer:
    """Stands for verl-omni's vLLM-Omni servers: requests with sampling parameters in, images out."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline

    async def generate(self, prompt: str, sampling_params: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Clean latents [C, h, w] and the image [3, H, W]."""
        latents = self._pipeline(prompt, output_type="latent", **sampling_params).images
        vae = self._pipeline.vae
        image = vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor).sample / 2 + 0.5
        return {"latents": latents[0], "image": image[0].clamp(0, 1)}


class SeededAgentLoop:
    """Generates one row from its seed. In verl-omni: `DiffusionSingleTurnAgentLoop`, registered under a new name."""

    def __init__(self, server: GenerationServer, latent_shape: Sequence[int]) -> None:
        self._server = server
        self._shape = latent_shape

    async def run(self, sampling_params: dict[str, Any], *, raw_prompt: str, seed: int) -> dict[str, torch.Tensor]:
        """Generate; other columns of the row would be further keywords."""
        latents = torch.from_numpy(initial_noise([seed], self._shape))
        return await self._server.generate(raw_prompt, sampling_params | {"latents": latents})


class Trainer:
    """Trains a LoRA of SD3 on the best and worst of many candidates.

    Args:
        folder: of the model, in diffusers' layout.
        client: client of a service with this model.
        hosted: the model at the service.
        candidates: explored for a prompt.
        n: rows of a prompt, `rollout.n`: the candidates that are trained on.
        steps: of their generation.
        run: name of the run at the service, a new one.
    """

    def __init__(
        self,
        folder: str,
        client: RolloutClient,
        hosted: ModelInfo,
        *,
        candidates: int = 48,
        n: int = 8,
        steps: int = 10,
        run: str,
    ) -> None:
        self.client, self.hosted, self.run = client, hosted, run
        self.candidates, self.n, self.global_steps = candidates, n, 0
        self.pipeline = StableDiffusion3Pipeline.from_pretrained(folder, torch_dtype=torch.float32)
        self.pipeline.set_progress_bar_config(disable=True)
        self.actor = self.pipeline.transformer.requires_grad_(False)
        self.actor.add_adapter(LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(hosted.lora_targets)))
        self.optimizer = torch.optim.AdamW([w for w in self.actor.parameters() if w.requires_grad], lr=1e-3)
        self.agent_loop = SeededAgentLoop(GenerationServer(self.pipeline), hosted.latent_shape)
        self.sampling_params = {"num_inference_steps": steps} | hosted.pipeline_call

    def fit(self, batches: Iterable[Sequence[str]]) -> None:
        """Train on batches of prompts."""
        self.update_weights(parent=None)
        for prompts in batches:
            uids = np.array([str(uuid4()) for _ in prompts], dtype=object)
            rows = self.explored({"uid": uids, "raw_prompt": np.array(prompts, dtype=object)})
            outputs = asyncio.run(self.generate_sequences(rows))
            scores = redness(torch.stack([output["image"] for output in outputs]), list(rows["raw_prompt"]), [])
            loss = self.update_actor(rows, outputs, self.advantages(scores, rows["uid"]))
            self.global_steps += 1
            self.update_weights(parent=self.global_steps - 1)
            print(f"step {self.global_steps}: mean score {scores.mean():.4f}, loss {loss:.4f}")

    def explored(self, batch: Rows) -> Rows:
        """The batch, each row repeated n times with a seed of its own: those of the best and worst candidates.

        In verl-omni, it replaces `gen_batch.repeat` in the driver's `fit`.
        """
        request = RolloutRequest(
            model=self.hosted.name,
            adapter=AdapterRef(run=self.run, version=self.global_steps),
            prompts=tuple(PromptItem(id=str(i), text=text) for i, text in enumerate(batch["raw_prompt"])),
            candidates=Candidates(count=self.candidates, seed_root=self.global_steps),
            plan=Plan(steps=6),
            rewards=(RewardSpec(name="colours:redness"),),
        )
        seeds = [seed for group in self.client.rollouts(request).groups for seed in group.best_worst(self.n)]
        return {name: np.repeat(column, self.n) for name, column in batch.items()} | {"seed": np.array(seeds)}

    @torch.no_grad()
    async def generate_sequences(self, rows: Rows) -> list[dict[str, torch.Tensor]]:
        """Generate all rows; the agent loop gets each row's columns as keywords."""
        each = zip(rows["raw_prompt"], rows["seed"].tolist(), strict=True)
        return await asyncio.gather(
            *(self.agent_loop.run(dict(self.sampling_params), raw_prompt=text, seed=seed) for text, seed in each)
        )

    def advantages(self, scores: torch.Tensor, uids: np.ndarray) -> torch.Tensor:
        """GRPO's: relative to the rows of the same prompt."""
        found = torch.zeros_like(scores)
        for uid in set(uids):
            own = torch.from_numpy(uids == uid)
            found[own] = (scores[own] - scores[own].mean()) / (scores[own].std() + 1e-6)
        return found

    def update_actor(self, rows: Rows, outputs: Sequence[dict[str, torch.Tensor]], advantages: torch.Tensor) -> float:
        """One step: flow matching on the images, weighted by their advantages. Your loss belongs here."""
        clean = torch.stack([output["latents"] for output in outputs])
        states, _, pooled, _ = self.pipeline.encode_prompt(
            list(rows["raw_prompt"]),
            None,
            None,
            do_classifier_free_guidance=False,
            max_sequence_length=self.sampling_params["max_sequence_length"],
        )
        noise, sigma = torch.randn_like(clean), torch.rand(len(clean))
        level = sigma.view(-1, 1, 1, 1)
        velocity = self.actor((1 - level) * clean + level * noise, states, pooled, sigma * 1000).sample
        loss = (advantages * (velocity - (noise - clean)).square().mean((1, 2, 3))).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def update_weights(self, parent: int | None) -> None:
        """Give the service the weights under which it explores next, as the generation servers get theirs."""
        weights = get_peft_model_state_dict(self.actor)
        file = adapter_file(weights, self.hosted.lora_targets, rank=RANK, alpha=ALPHA)
        self.client.push(self.run, self.global_steps, parent, self.hosted.name, file)


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description="A loop in the manner of verl-omni.")
    parser.add_argument("--model", required=True, help="folder of an SD3 model in diffusers' layout")
    parser.add_argument("--name", help="its name at the service, by default the only one there")
    parser.add_argument("--run", default=f"verl-omni-like-{uuid4().hex[:8]}", help="a new run's name there")
    parser.add_argument("--url", default="http://127.0.0.1:8100", help="of the service")
    parser.add_argument("--steps", type=int, default=3, help="of training")
    given = parser.parse_args()
    with RolloutClient(given.url) as client:
        hosted = client.model(given.name or client.models().models[0].name)
        Trainer(given.model, client, hosted, run=given.run).fit([["a red circle", "two blue squares"]] * given.steps)


if __name__ == "__main__":
    try:
        main()
    except ProblemError as error:  # such as a run of that name, from an earlier start
        sys.exit(str(error))
