"""A loop in the manner of verl-omni; a rollout service finds its seeds.

As there, a driver repeats the rows of a batch, an agent loop generates each of them at a generation server, and
advantages are relative to the rows of one `uid`. A row carries its seed to the agent loop, which makes the noise:
verl-omni's own servers would draw other noise from that seed, on their GPU. Of solrl it needs solrl-client alone. Start
the service in this folder, then the loop:

    solrl-rollout serve --model mini-sd3 --rewards colours:redness
    python verl_omni_like.py --model mini-sd3
"""

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from colours import redness
from sd3_lora import Sd3Lora, main
from solrl_client.noise import initial_noise

Rows = dict[str, np.ndarray]
"""Columns of a batch, as `DataProto.non_tensor_batch` has them."""


class GenerationServer:
    """Stands for verl-omni's vLLM-Omni servers: requests with sampling parameters in, images out."""

    def __init__(self, lora: Sd3Lora) -> None:
        self._lora = lora

    async def generate(self, prompt: str, sampling_params: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Clean latents [C, h, w] and the image [3, H, W]."""
        latents = self._lora.pipeline(prompt, output_type="latent", **sampling_params).images
        return {"latents": latents[0], "image": self._lora.decode(latents)[0]}


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
    """Trains a LoRA on the best and worst of many candidates.

    Args:
        lora: the LoRA, with its service.
        candidates: explored for a prompt.
        n: rows of a prompt, `rollout.n`: the candidates that are trained on.
        steps: steps of their generation.
    """

    def __init__(self, lora: Sd3Lora, *, candidates: int = 48, n: int = 8, steps: int = 10) -> None:
        self.lora, self.candidates, self.n = lora, candidates, n
        self.agent_loop = SeededAgentLoop(GenerationServer(lora), lora.hosted.latent_shape)
        self.sampling_params = {"num_inference_steps": steps} | lora.hosted.pipeline_call

    def fit(self, batches: Iterable[Sequence[str]]) -> None:
        """Train on batches of prompts."""
        for step, prompts in enumerate(batches, 1):
            began = time.monotonic()
            uids = np.array([str(uuid4()) for _ in prompts], dtype=object)
            rows = self.explored({"uid": uids, "raw_prompt": np.array(prompts, dtype=object)})
            outputs = asyncio.run(self.generate_sequences(rows))
            scores = redness(torch.stack([output["image"] for output in outputs]), list(rows["raw_prompt"]), [])
            latents = torch.stack([output["latents"] for output in outputs])
            loss = self.lora.train(list(rows["raw_prompt"]), latents, self.advantages(scores, rows["uid"]))
            took = time.monotonic() - began
            print(f"step {step}: reward {scores.mean():.4f}, loss {loss:.4f}, {took:.0f} s", flush=True)

    def explored(self, batch: Rows) -> Rows:
        """The batch, each row repeated n times with a seed of its own: the seeds of the best and worst candidates.

        In verl-omni, it replaces `gen_batch.repeat` in the driver's `fit`.
        """
        seeds = np.array(self.lora.explore(batch["raw_prompt"], self.candidates, self.n)).ravel()
        return {name: np.repeat(column, self.n) for name, column in batch.items()} | {"seed": seeds}

    @torch.no_grad()
    async def generate_sequences(self, rows: Rows) -> list[dict[str, torch.Tensor]]:
        """Generate all rows; the agent loop gets each row's columns as keywords."""
        text_seeds = zip(rows["raw_prompt"], rows["seed"].tolist(), strict=True)
        return await asyncio.gather(
            *(self.agent_loop.run(dict(self.sampling_params), raw_prompt=text, seed=seed) for text, seed in text_seeds)
        )

    def advantages(self, scores: torch.Tensor, uids: np.ndarray) -> torch.Tensor:
        """GRPO's: relative to the rows of the same prompt."""
        advantages = torch.zeros_like(scores)
        for uid in set(uids):
            rows = torch.from_numpy(uids == uid)
            advantages[rows] = (scores[rows] - scores[rows].mean()) / (scores[rows].std() + 1e-6)
        return advantages


if __name__ == "__main__":
    main("verl-omni", lambda lora, rounds: Trainer(lora).fit([["a red circle", "two blue squares"]] * rounds))
