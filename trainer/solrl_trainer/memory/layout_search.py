"""Layout of a run in the memory of its GPU, decided before large weights are moved there."""

import logging
from dataclasses import replace

import torch
from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.memory_plan import RESERVED, modules_of, weight_bytes
from solrl_core.precision import fastest_precision

from solrl_trainer.memory.run_memory import MemoryLayout, RunMemory, Wanted, plan_run
from solrl_trainer.policy.sharding import check_sharding
from solrl_trainer.ranks.communicator import Communicator, gather_values
from solrl_trainer.settings.config import RunConfig

logger = logging.getLogger(__name__)


def find_layout(config: RunConfig, backbone: PipelineBackbone, world: Communicator) -> MemoryLayout:
    """The layout that the settings and the memory plan determine; the log says what is unusual in it.

    Args:
        config: the run's settings.
        backbone: the model, before generators and policy are built; its large parts may be in host memory.
        world: the ranks; all share the base, or none.

    Raises:
        ValueError: the base is to be sharded, and cannot be.
    """
    check_sharding(config, backbone.device, world)
    blocks = sum(len(list(backbone.transformer.get_submodule(name).children())) for name in backbone.blocks)
    wanted = Wanted.of(config, blocks, world.size)
    if backbone.device.type != "cuda":
        layout = MemoryLayout(wanted.sharded is True, wanted.offloaded is True, wanted.checkpointed or 0)
    else:
        layout = wanted.layout or _planned(config, backbone, world)
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
        layout = replace(plan, wanted=replace(plan.wanted, sharded=True)).layout(gpu)
    if plan.wanted.checkpointed is None:
        blocks = len(plan.training.kept)
        logger.info(
            f"the run needs about {plan.total(layout) / 2**30:.1f} of {(gpu - RESERVED) / 2**30:.1f} GiB: with "
            f"micro-batches of {config.optimizer.batch}, {blocks - layout.checkpointed} of {blocks} blocks keep their "
            f"activations, {layout.checkpointed} recompute them; optimizer.activation_checkpointing overrides this"
        )
    return layout


def usable_bytes(backbone: PipelineBackbone, plan: RunMemory) -> int:
    """Bytes of a GPU that a run can use, those of its loaded rewards and parts included."""
    device = backbone.device
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    rewards = sum(size for size in plan.rewards.values() if size is not None)
    loaded = {
        name: part
        for name, part in modules_of(backbone).items()
        if all(weight.device == device for weight in part.parameters())
    }
    return torch.cuda.mem_get_info(device)[0] + cached + rewards + sum(weight_bytes(loaded).values())
