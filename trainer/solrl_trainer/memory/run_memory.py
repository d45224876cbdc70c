"""Memory plan of a run on its GPUs, from its settings and the model's configurations; no weights are needed."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.families.skeleton import Meta
from solrl_core.memory_plan import RESERVED, fitting, generation_peaks, modules_of, weight_bytes
from solrl_core.precision.support import fastest_precision
from solrl_core.rewards.size import reward_bytes
from solrl_core.sampling.generator import Generator
from solrl_proto.identifiers import Precision
from torch import nn

from solrl_trainer.memory.training_memory import TrainingPlan, iteration_bytes, plan_training
from solrl_trainer.policy.sharding import check_sharding, sharded_bytes
from solrl_trainer.ranks.communicator import Communicator, gather_values
from solrl_trainer.settings.config import RunConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MemoryLayout:
    """The use that a run makes of its GPU's memory.

    Attributes:
        sharded: the base's blocks are spread over the ranks.
        offloaded: text encoders are in host memory, except while prompts are encoded.
        checkpointed: number of blocks with activation checkpointing, which keep only their inputs.
    """

    sharded: bool
    offloaded: bool
    checkpointed: int


@dataclass(frozen=True)
class LayoutSettings:
    """The parts of a layout that the run's settings determine; None where the plan does."""

    sharded: bool | None
    offloaded: bool | None
    checkpointed: int | None

    @classmethod
    def of(cls, config: RunConfig, blocks: int, ranks: int) -> "LayoutSettings":
        """The parts that the settings of a run with `ranks` ranks determine, for a model with `blocks` blocks."""
        optimizer = config.optimizer
        checkpointed = optimizer.activation_checkpointing
        if checkpointed != "auto":
            checkpointed = min(int(checkpointed), blocks) if type(checkpointed) is int else blocks * bool(checkpointed)
        return cls(
            sharded=False if ranks == 1 else None if optimizer.shard_base == "auto" else optimizer.shard_base,
            offloaded=None if optimizer.encoders == "auto" else optimizer.encoders == "cpu",
            checkpointed=None if checkpointed == "auto" else checkpointed,
        )

    @property
    def layout(self) -> MemoryLayout | None:
        """The layout, if the settings determine all of it."""
        if self.sharded is None or self.offloaded is None or self.checkpointed is None:
            return None
        return MemoryLayout(self.sharded, self.offloaded, self.checkpointed)


@dataclass(frozen=True)
class RunMemory:
    """Bytes that a run needs on each GPU.

    Attributes:
        weights: part → bytes of frozen weights; a generator's without the weights that it shares with the base.
        sharded: the same, if the base is spread over the ranks.
        gathered: bytes of the blocks that are whole at one time, if the base is spread.
        encoders: text encoder → bytes of its weights.
        rewards: reward → bytes of its weights; None if unknown, which counts as none.
        iteration: use → bytes of samples and encoded prompts.
        generation: phase → peak bytes in addition to everything else.
    """

    weights: dict[str, int]
    sharded: dict[str, int]
    gathered: int
    encoders: dict[str, int]
    rewards: dict[str, int | None]
    iteration: dict[str, int]
    generation: dict[str, int]
    training: TrainingPlan
    settings: LayoutSettings

    def layout(self, gpu: int) -> MemoryLayout:
        """The layout on a GPU of `gpu` bytes.

        The base is spread only if training does not fit otherwise. Encoders are offloaded only if the run does not fit
        otherwise, or more blocks would be checkpointed.
        """
        settings = self.settings
        sharded = settings.sharded
        if sharded is None:
            smallest = MemoryLayout(False, settings.offloaded is not False, len(self.training.kept))
            sharded = self.resident(smallest) + self.phases(smallest)["train"] > gpu - RESERVED
        staying, offloaded = (self._checkpointing(sharded, offloaded, gpu) for offloaded in (False, True))
        if settings.offloaded is None:
            leave = offloaded.checkpointed < staying.checkpointed or not self.fits(staying, gpu)
        else:
            leave = settings.offloaded
        return offloaded if leave else staying

    def _checkpointing(self, sharded: bool, offloaded: bool, gpu: int) -> MemoryLayout:
        """The layout with as few checkpointed blocks as fit."""
        blocks = self.settings.checkpointed
        if blocks is None:
            layout = MemoryLayout(sharded, offloaded, 0)
            gathered = self.gathered if sharded else 0
            blocks = self.training.checkpointed(gpu - RESERVED - gathered - self.resident(layout) + self.training.state)
        return MemoryLayout(sharded, offloaded, blocks)

    def resident_weights(self, layout: MemoryLayout) -> dict[str, int]:
        """Part → bytes of frozen weights that are on the GPU in every phase."""
        weights = self.sharded if layout.sharded else self.weights
        return weights if layout.offloaded else {**weights, **self.encoders}

    def resident(self, layout: MemoryLayout) -> int:
        """Bytes in use in every phase: all weights, the optimiser's state, samples and prompts."""
        rewards = [size for size in self.rewards.values() if size is not None]
        frozen = sum(self.resident_weights(layout).values())
        return frozen + sum(rewards) + sum(self.iteration.values()) + self.training.state

    def phases(self, layout: MemoryLayout) -> dict[str, int]:
        """Phase → peak bytes in addition to the bytes in use in every phase."""
        gathered = self.gathered if layout.sharded else 0
        phases = {phase: peak + gathered * phase.startswith("denoise") for phase, peak in self.generation.items()}
        if layout.offloaded:
            phases["encode"] += sum(self.encoders.values())
        return {**phases, "train": gathered + sum(self.training.activations(layout.checkpointed).values())}

    def total(self, layout: MemoryLayout) -> int:
        """Bytes at the peak of the largest phase."""
        return self.resident(layout) + max(self.phases(layout).values())

    def fits(self, layout: MemoryLayout, gpu: int) -> bool:
        """Whether the layout fits in a GPU of `gpu` bytes."""
        return self.total(layout) <= gpu - RESERVED

    def largest_batch(self, batch: int, gpu: int) -> int:
        """Largest micro-batch that fits in a GPU of `gpu` bytes; 0 if none does. `batch` is the planned one."""
        for size in range(batch, 0, -1):
            plan = replace(self, training=self.training.scaled(size / batch))
            if plan.fits(plan.layout(gpu), gpu):
                return size
        return 0


def plan_run(config: RunConfig, backbone: PipelineBackbone, fastest: Precision, ranks: int = 1) -> RunMemory:
    """Plan a run on `ranks` GPUs; it counts tensors on the meta device.

    The model is of `load_skeleton`, and cannot generate afterwards. explore.precision=auto selects the GPU's `fastest`
    native precision. A ValueError names a reward that does not exist, or configurations that do not fit together.
    """
    explored = explored_precision(config, fastest)
    with fitting(backbone):
        generators = {"generator": Generator(backbone, "bf16")}
        if explored != "bf16":
            generators["explorer"] = Generator(backbone, explored)
        modules: dict[str, nn.Module] = {"transformer": backbone.transformer, **modules_of(backbone)}
        modules |= {name: generator.transformer for name, generator in generators.items()}
        names = backbone.text_encoders
        encoders = weight_bytes({name: modules.pop(name) for name in names})
        sharded, gathered = sharded_bytes(modules, backbone.blocks, ranks)
        weights = weight_bytes(modules)
        with Meta(), torch.inference_mode():
            row = backbone.encode(["a"], config.guidance)
        training = plan_training(backbone, config.lora, config.optimizer.batch, row, config.guidance)
        generation = generation_peaks(list(generators.values()), config.batch, config.guidance)
    return RunMemory(
        weights=weights,
        sharded=sharded,
        gathered=gathered,
        encoders=encoders,
        rewards=reward_sizes(config, backbone.options.rewards),
        iteration=iteration_bytes(config, backbone, row),
        generation=generation,
        training=training,
        settings=LayoutSettings.of(config, len(training.kept), ranks),
    )


def explored_precision(config: RunConfig, fastest: Precision) -> Precision:
    """Precision of the local explorer's generator; BF16 if only a service explores.

    `auto` is the device's `fastest` native precision, and BF16 if training uses the candidates themselves.
    """
    if not config.explores_here:
        return "bf16"
    if config.explore.precision != "auto":
        return config.explore.precision
    return fastest if config.two_stage else "bf16"


def reward_sizes(config: RunConfig, model_options: Mapping[str, Mapping[str, Any]]) -> dict[str, int | None]:
    """Reward → bytes of its weights, None if unknown; `model_options` are `rewards` in the model's `solrl.json`."""
    names = dict.fromkeys([*config.rewards, *config.evaluate.rewards])
    return {
        name: reward_bytes(name, {**model_options.get(name, {}), **config.reward_options.get(name, {})})
        for name in names
    }


def find_layout(config: RunConfig, backbone: PipelineBackbone, world: Communicator) -> MemoryLayout:
    """The layout that the settings and the memory plan determine; the log says what is unusual in it.

    The model has no generators and policy yet, and its large parts may be in host memory. All ranks share the base, or
    none. A ValueError says why a base cannot be sharded as the settings ask.
    """
    check_sharding(config, backbone.device, world)
    blocks = sum(len(list(backbone.transformer.get_submodule(name).children())) for name in backbone.blocks)
    settings = LayoutSettings.of(config, blocks, world.size)
    if backbone.device.type != "cuda":
        layout = MemoryLayout(settings.sharded is True, settings.offloaded is True, settings.checkpointed or 0)
    else:
        layout = settings.layout or _planned(config, backbone, world)
    if layout.sharded:
        logger.info(f"the base is sharded across {world.size} ranks; optimizer.shard_base overrides this")
    if layout.offloaded:
        logger.info("text encoders are moved to the device only to encode prompts; optimizer.encoders overrides this")
    return layout


def _planned(config: RunConfig, backbone: PipelineBackbone, world: Communicator) -> MemoryLayout:
    plan = plan_run(config, backbone.on_meta(), fastest_precision(backbone.device), world.size)
    gpu = usable_bytes(backbone, plan)
    layout = plan.layout(gpu)
    if any(gather_values(layout.sharded, world)) and not layout.sharded:
        layout = replace(plan, settings=replace(plan.settings, sharded=True)).layout(gpu)
    if plan.settings.checkpointed is None:
        blocks = len(plan.training.kept)
        logger.info(
            f"the run needs about {plan.total(layout) / 2**30:.1f} of {(gpu - RESERVED) / 2**30:.1f} GiB: with "
            f"micro-batches of {config.optimizer.batch}, {blocks - layout.checkpointed} of {blocks} blocks keep their "
            f"activations, {layout.checkpointed} recompute them; optimizer.activation_checkpointing overrides this"
        )
    return layout


def usable_bytes(backbone: PipelineBackbone, plan: RunMemory) -> int:
    """Bytes of a GPU that a run can use, its loaded rewards and parts included."""
    device = backbone.device
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    rewards = sum(size for size in plan.rewards.values() if size is not None)
    loaded = {
        name: part
        for name, part in modules_of(backbone).items()
        if all(weight.device == device for weight in part.parameters())
    }
    return torch.cuda.mem_get_info(device)[0] + cached + rewards + sum(weight_bytes(loaded).values())
