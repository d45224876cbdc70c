"""Memory plan of a run on its GPU, from its settings and the model's configurations; no weights are needed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.families.skeleton import Meta
from solrl_core.generator import CHUNK_SIZE, Generator
from solrl_core.memory import RESERVED, generation_peaks, modules_of, weight_bytes
from solrl_core.rewards.size import reward_bytes
from solrl_proto.identifiers import Tier
from torch import nn

from solrl_trainer.config import RunConfig
from solrl_trainer.models import explored_precision
from solrl_trainer.training_memory import TrainingPlan, iteration_bytes, plan_training, wanted_blocks


@dataclass(frozen=True)
class RunMemory:
    """Bytes that a run needs on its GPU.

    Attributes:
        weights: part → bytes of frozen weights; a generator has those that it does not share with the frozen base.
        rewards: reward → bytes of its weights; None if unknown, which counts as none.
        iteration: use → bytes of samples and encoded prompts.
        generation: phase → peak bytes in addition to everything else.
        training: plan of the training phase.
        wanted: number of blocks that the run's settings recompute; None if the GPU's size determines it.
    """

    weights: dict[str, int]
    rewards: dict[str, int | None]
    iteration: dict[str, int]
    generation: dict[str, int]
    training: TrainingPlan
    wanted: int | None

    def recomputed(self, gpu: int) -> int:
        """Number of blocks that recompute their activations on a GPU of `gpu` bytes."""
        free = gpu - RESERVED - self.held + self.training.state
        return self.training.recomputed(free) if self.wanted is None else self.wanted

    @property
    def held(self) -> int:
        """Bytes in use in every phase: all weights, the optimiser's state, samples and prompts."""
        known = [size for size in self.rewards.values() if size is not None]
        return sum(self.weights.values()) + sum(known) + sum(self.iteration.values()) + self.training.state

    def phases(self, recomputed: int) -> dict[str, int]:
        """Phase → peak bytes in addition to those in use in every phase."""
        return {**self.generation, "train": sum(self.training.activations(recomputed).values())}

    def total(self, recomputed: int) -> int:
        """Bytes at the peak of the largest phase."""
        return self.held + max(self.phases(recomputed).values())


def plan_run(config: RunConfig, backbone: PipelineBackbone, fastest: Tier) -> RunMemory:
    """Plan a run on the meta device; it counts tensors.

    Args:
        config: the run's settings.
        backbone: the run's model from `load_skeleton`. It cannot generate afterwards.
        fastest: fastest native precision of the GPU, which explore.precision=auto selects.

    Raises:
        ValueError: a reward does not exist.
    """
    explored = explored_precision(config, fastest)
    generators = {"generator": Generator(backbone, "bf16")}
    if explored != "bf16":
        generators["explorer"] = Generator(backbone, explored)
    modules: dict[str, nn.Module] = {"transformer": backbone.transformer, **modules_of(backbone)}
    modules |= {name: generator.transformer for name, generator in generators.items()}
    if config.optimizer.reference == "fp8":
        modules["reference"] = Generator(backbone, "fp8").transformer
    with Meta(), torch.inference_mode():
        row = backbone.encode(["a"], config.guidance)
    training = plan_training(backbone, config.lora, config.optimizer.batch, row, config.guidance)
    generation: dict[str, int] = {}
    for generator in generators.values():
        peaks = generation_peaks(generator, CHUNK_SIZE, config.guidance)
        generation |= {f"denoise, {generator.precision}": peaks.pop("denoise"), **peaks}
    return RunMemory(
        weights=weight_bytes(modules),
        rewards=_rewards(config, backbone.options.rewards),
        iteration=iteration_bytes(config, backbone, row),
        generation=generation,
        training=training,
        wanted=wanted_blocks(config, len(training.kept)),
    )


def _rewards(config: RunConfig, model_options: Mapping[str, Mapping[str, Any]]) -> dict[str, int | None]:
    names = dict.fromkeys([*config.rewards, *config.evaluate.rewards])
    return {
        name: reward_bytes(name, {**model_options.get(name, {}), **config.reward_options.get(name, {})})
        for name in names
    }
