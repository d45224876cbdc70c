"""Helpers of the tests of the trainer: settings and records of runs, and small updates without a service."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from solrl_core.families import Backbone
from solrl_core.sampling.generator import Generator
from solrl_trainer.algorithms.registry import ALGORITHMS
from solrl_trainer.algorithms.training_data import TrainingSamples
from solrl_trainer.memory.run_memory import LayoutSettings
from solrl_trainer.policy.policy import Policy
from solrl_trainer.policy.update import UpdateFigures, Updater
from solrl_trainer.ranks.communicator import Communicator
from solrl_trainer.run_folder.metrics_file import read_metrics
from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.presets import resolve

TINY = ("lora.rank=2", "lora.alpha=4", "regenerate.steps=4", "optimizer.updates=2", "optimizer.batch=4")
QUICK = (
    *TINY,
    *("explore.prompts=2", "explore.candidates=4", "explore.keep=2", "explore.steps=2", "regenerate.steps=2"),
    *("evaluate.prompts=1", "evaluate.seeds=1", "evaluate.steps=2", "evaluate.every=0", "evaluate.rewards=[]"),
    *("evaluate.fidelity_prompts=0", "iterations=1"),
)
"""Settings of a run that takes a second."""
PROMPTS = ["a red circle", "two blue squares", "a green cross", "a small cyan triangle"]


def tiny_config(*overrides: str, **arguments: Any) -> RunConfig:
    """A reduced version of the miniature's preset, which explores at a service, under the newest version."""
    served = ("rollout_url=http://127.0.0.1:8100", "explore.lag=0", *TINY)
    return resolve("mini-sana/sol_rl/clipscore", overrides=[*served, *overrides], arguments=arguments).config


def run_config(preset: str, output: Path, *overrides: str, **arguments: Any) -> RunConfig:
    given = {"output": output, "run": output.name, **arguments}
    return resolve(preset, overrides=overrides, arguments=given).config


def sets(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def make_policy(backbone: Backbone, config: RunConfig) -> tuple[Policy, torch.optim.AdamW]:
    blocks = sum(len(list(backbone.transformer.get_submodule(name).children())) for name in backbone.blocks)
    policy = Policy(backbone, config.lora, config.seed)
    policy.checkpoint_activations(LayoutSettings.of(config, blocks, 1).checkpointed or 0)
    return policy, torch.optim.AdamW(policy.parameters, lr=config.optimizer.learning_rate)


def make_samples(
    backbone: Backbone, advantages: list[float] | None = None, prompts: list[str] = PROMPTS, seed: int = 7
) -> TrainingSamples:
    """Four random latents of a seed, the same number for each prompt."""
    latents = torch.randn(4, *backbone.latent_shape, generator=torch.Generator().manual_seed(seed))
    values = [1.0, -1.0, 0.5, -0.5] if advantages is None else advantages
    rows = torch.arange(len(prompts)).repeat_interleave(4 // len(prompts))
    return TrainingSamples(latents, torch.tensor(values), backbone.encode(prompts), rows)


def updater(policy: Policy, backbone: Backbone, optimizer: torch.optim.Optimizer, config: RunConfig) -> Updater:
    algorithm = ALGORITHMS.find(config.algorithm.name)(config.algorithm)
    return Updater(backbone, policy, optimizer, algorithm, config, Communicator())


def train_on(
    samples: TrainingSamples,
    policy: Policy,
    backbone: Backbone,
    optimizer: torch.optim.Optimizer,
    config: RunConfig,
    iteration: int,
) -> UpdateFigures:
    return updater(policy, backbone, optimizer, config).update(samples, iteration)


def velocity(backbone: Backbone, policy: Policy | Generator | None = None) -> torch.Tensor:
    """The transformer's velocity at fixed latents and time."""
    x = torch.randn(2, *backbone.latent_shape, generator=torch.Generator().manual_seed(3)).to(backbone.device)
    transformer = backbone.transformer if policy is None else policy.transformer
    sigma = torch.tensor([0.8, 0.3], device=backbone.device)
    return backbone.velocity(transformer, x, sigma, backbone.encode(PROMPTS[:2]))


class Ranks(Communicator):
    """A world of some size in which all ranks have equal values, from the view of one rank."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.local_rank = rank, size, rank

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor] * self.size


def prompts_in(
    folder: Path, train: Sequence[str] = ("a red circle", "two blue squares"), test: Sequence[str] = ("a green cross",)
) -> Path:
    """A folder with text files of both splits."""
    folder.mkdir(exist_ok=True)
    for split, texts in (("train", train), ("test", test)):
        (folder / f"{split}.txt").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return folder


def redness(images: torch.Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> torch.Tensor:
    """A reward that needs no model: red minus the mean of green and blue."""
    return images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether tensors are equal by name, bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


def state(folder: Path, version: int) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(folder / "checkpoints" / f"{version:06d}" / "state.safetensors")
    return found


def events(folder: Path, event: str) -> list[dict[str, Any]]:
    """Lines of a run's metrics about an event."""
    return [line for line in read_metrics(folder / "metrics.jsonl") if line["event"] == event]


def unclocked(folder: Path) -> list[dict[str, Any]]:
    """Lines of a run's metrics, without clocks."""
    lines = read_metrics(folder / "metrics.jsonl")
    return [
        {key: value for key, value in line.items() if key not in ("time", "elapsed", "seconds", "scoring")}
        for line in lines
    ]


def iterations(folder: Path) -> list[dict[str, Any]]:
    """Lines of a run's iterations, without clocks."""
    return [line for line in unclocked(folder) if line["event"] == "iteration"]
