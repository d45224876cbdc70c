"""A frozen base that is sharded across the ranks (FSDP2), for GPUs that cannot hold it beside its training state.

Each block's weights are gathered for as long as it computes. LoRA weights and their optimiser stay whole on every rank.
Every pass through the blocks is then a collective of all ranks. They train equally many micro-batches, and generate in
step: a rank with nothing to generate takes part in the others' passes until all have finished.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from solrl_core.families import Backbone
from solrl_core.generator import Generator
from solrl_core.lanes import lane_count
from solrl_core.precision import refresh_weight_
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from solrl_trainer.config import RunConfig
from solrl_trainer.trained_blocks import wrap_blocks
from solrl_trainer.training_memory import run_plan
from solrl_trainer.world import World, gather_values

if TYPE_CHECKING:
    from solrl_trainer.policy import Policy


class InStepWorld:
    """A world whose ranks share the weights of a generator.

    Before any other collective, a rank takes part in the generator's passes of the others until none has any left.
    """

    def __init__(self, world: World, take_part: Callable[[], None]) -> None:
        """`take_part` does the collectives of one pass."""
        self.rank, self.size, self.local_rank = world.rank, world.size, world.local_rank
        self._world = world
        self._take_part = take_part

    def begin_pass(self) -> None:
        """Wait until each rank begins a pass, or takes part in it."""
        gather_values(True, self._world)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum of all ranks' tensors, bit-equal on every rank."""
        self._finish()
        return self._world.all_reduce(tensor)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """All ranks' tensors in the order of ranks, on every rank; their first axes may differ in length."""
        self._finish()
        return self._world.gather(tensor)

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's tensor, on every rank; `tensor` has its shape. No rank returns before rank 0 has called it."""
        self._finish()
        return self._world.broadcast(tensor)

    def notify(self, text: str) -> None:
        """Send a text to rank 0, without waiting."""
        self._world.notify(text)

    def on_notice(self, handle: Callable[[str], object]) -> None:
        """On rank 0: call `handle` with the text of each notice, in another thread. Its error shuts all ranks down."""
        self._world.on_notice(handle)

    def _finish(self) -> None:
        while any(gather_values(False, self._world)):
            self._take_part()


def is_sharded(config: RunConfig, backbone: Backbone, world: World) -> bool:
    """Whether the run spreads its base over the ranks: as set, or for `auto` if it does not fit beside its training.

    Args:
        config: the run's settings.
        backbone: the loaded model, without a policy.
        world: the ranks; all decide alike.

    Raises:
        ValueError: it cannot.
    """
    wanted = config.optimizer.shard_base
    if wanted is True and world.size == 1:
        raise ValueError("optimizer.shard_base is true for one process; expected several ranks: start with torchrun")
    if wanted is True and backbone.device.type == "cpu" and lane_count() > 1:
        raise ValueError(
            f"optimizer.shard_base is true on a CPU with {lane_count()} threads; expected one: set OMP_NUM_THREADS=1"
        )
    if wanted != "auto" or world.size == 1 or backbone.device.type == "cpu":
        return wanted is True
    plan, limit = run_plan(config, backbone)
    short = plan.total(len(plan.kept)) > limit
    return any(gather_values(short, world))


def freed_bytes(backbone: Backbone, generator: Generator, size: int) -> int:
    """GPU memory that spreading the blocks over `size` ranks frees, two gathered blocks allowed for."""
    held: dict[int, int] = {}
    shards = largest = 0
    for transformer in (backbone.transformer, generator.transformer):
        for name in backbone.blocks:
            for block in transformer.get_submodule(name).children():
                own = {id(weight): weight.nbytes for weight in block.parameters()}
                held |= own
                shards += -(-sum(own.values()) // size)
                largest = max(largest, sum(own.values()))
    return sum(held.values()) - shards - 2 * largest


def shard_base(
    backbone: Backbone, generator: Generator, others: Sequence[Generator], policy: "Policy", world: World
) -> InStepWorld:
    """Spread the blocks of a policy and of its BF16 generator over the ranks, in place.

    Args:
        backbone: the model around them.
        generator: of the samples.
        others: generators at other precisions. They stay whole, and read the base's weights for merging.
        policy: of the run.
        world: the ranks.

    Returns:
        The world to use from now on.
    """
    mesh = init_device_mesh(backbone.device.type, (world.size,))
    for block in policy.blocks:
        fully_shard(block, mesh=mesh, ignored_params=set(policy.parameters), reshard_after_forward=True)
    served = [
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
        for block in wrap_blocks(generator.transformer, backbone)
    ]

    def read(name: str) -> torch.Tensor:
        weight = policy.layers[name].base.weight.detach()
        return weight.full_tensor() if isinstance(weight, DTensor) else weight

    def write(module: nn.Module, weight: torch.Tensor) -> None:
        if not isinstance(module.weight, DTensor):
            refresh_weight_(module, weight)
            return
        parts = weight.detach().to(torch.bfloat16).chunk(world.size)
        if world.rank < len(parts):
            module.weight.to_local().copy_(parts[world.rank])

    for one in (generator, *others):
        one.merge_through(read, write)
    in_step = InStepWorld(world, lambda: _take_part(served))
    generator.transformer.register_forward_pre_hook(lambda *_: in_step.begin_pass())
    return in_step


@torch.inference_mode()
def _take_part(blocks: Sequence[FSDPModule]) -> None:
    """Gather and free the weights of each block, as a pass does."""
    for block in blocks:
        block.unshard()
        block.reshard()
