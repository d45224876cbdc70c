"""A frozen base that is sharded across the ranks (FSDP2), for GPUs that cannot hold it beside its training state.

Each block's weights are gathered for as long as it computes. LoRA weights and their optimiser stay whole on every rank.
Every pass through the blocks is then a collective of all ranks. They train equally many micro-batches, and generate in
step: a rank with nothing to generate takes part in the other ranks' passes until all have finished.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from solrl_core.families import Backbone
from solrl_core.precision.layers import refresh_weight_
from solrl_core.sampling.cpu_threads import thread_count
from solrl_core.sampling.generator import Generator
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from solrl_trainer.policy.policy import Policy, wrap_blocks
from solrl_trainer.ranks.communicator import Communicator, gather_values
from solrl_trainer.settings.config import RunConfig

SHARDED = ("transformer", "generator")
"""Parts of a run, by the names of the memory plan, whose blocks are sharded."""


class LockstepCommunicator(Communicator):
    """A world whose ranks share the weights of a generator.

    Before any other collective, a rank takes part in the other ranks' passes of the generator until none are left.
    """

    in_step = True

    def __init__(self, world: Communicator, take_part: Callable[[], None]) -> None:
        """`take_part` does the collectives of one pass."""
        self.rank, self.size, self.local_rank = world.rank, world.size, world.local_rank
        self._world = world
        self._take_part = take_part

    def before_forward(self) -> None:
        """Wait until each rank begins a pass, or takes part in it."""
        gather_values(True, self._world)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self._finish()
        return self._world.all_reduce(tensor)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._finish()
        return self._world.gather(tensor)

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        self._finish()
        return self._world.broadcast(tensor)

    def notify(self, text: str) -> None:
        self._world.notify(text)

    def on_notice(self, handle: Callable[[str], object]) -> None:
        self._world.on_notice(handle)

    def _finish(self) -> None:
        while any(gather_values(False, self._world)):
            self._take_part()


def check_sharding(config: RunConfig, device: torch.device, world: Communicator) -> None:
    """Refuse `optimizer.shard_base=true` for one process, or on a CPU with several threads, by a ValueError."""
    if config.optimizer.shard_base is not True:
        return
    if world.size == 1:
        raise ValueError("optimizer.shard_base is true for one process; expected several ranks: start with torchrun")
    if device.type == "cpu" and thread_count() > 1:
        raise ValueError(
            f"optimizer.shard_base is true on a CPU with {thread_count()} threads; expected one: set OMP_NUM_THREADS=1"
        )


def place(module: nn.Module, device: torch.device) -> None:
    """Move the weights of a module outside of sharded blocks to a device; modules that share them keep sharing them."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not isinstance(tensor, DTensor):
            tensor.data = tensor.data.to(device)


def sharded_bytes(modules: Mapping[str, nn.Module], blocks: Sequence[str], ranks: int) -> tuple[dict[str, int], int]:
    """Part → bytes of weights on each rank after `shard_base`, in no earlier part; and bytes of a gathered block.

    `modules` are all parts that a rank holds. Parts in `SHARDED` have their blocks sharded; `blocks` are the names of
    their lists of blocks.
    """
    counted: set[tuple[int, bool]] = set()
    sizes = {}
    for name, module in modules.items():
        split = set()
        if name in SHARDED:
            split = {id(weight) for part in blocks for weight in module.get_submodule(part).parameters()}
        sizes[name] = 0
        for tensor in (*module.parameters(), *module.buffers()):
            shared = (id(tensor), id(tensor) in split)
            if shared not in counted:
                sizes[name] += _share(tensor, ranks) if id(tensor) in split else tensor.nbytes
                if id(tensor) not in split or _is_shared(tensor, ranks):
                    counted.add(shared)
    every = [block for part in blocks for block in modules["transformer"].get_submodule(part).children()]
    largest = max(sum(weight.nbytes for weight in block.parameters()) for block in every)
    # The gathered parts, and the weights that they are copied to.
    return sizes, 2 * largest


def _share(weight: torch.Tensor, ranks: int) -> int:
    return -(-weight.shape[0] // ranks) * (weight.nbytes // weight.shape[0])


def _is_shared(weight: torch.Tensor, ranks: int) -> bool:
    """Whether policy and generator share their parts of a weight; parts of an uneven weight are padded copies."""
    return weight.shape[0] % ranks == 0


def shard_base(
    backbone: Backbone, generator: Generator, explorers: Sequence[Generator], policy: Policy, world: Communicator
) -> LockstepCommunicator:
    """Spread the blocks of a policy and of its BF16 generator over the ranks, in place; return the world to use then.

    Weights may be in host memory. Block after block moves to the device, where only this rank's part remains. All other
    weights follow. The generator of the samples shares its parts of the weights that no adapter changes with the
    policy. The `explorers`, at other precisions, stay whole, and read the base's weights for merging.
    """
    mesh = init_device_mesh(backbone.device.type, (world.size,))
    served = wrap_blocks(generator.transformer, backbone)
    adapters = set(policy.parameters)
    sharded = [
        _shard_together(trained, generating, mesh, adapters)
        for trained, generating in zip(policy.blocks, served, strict=True)
    ]
    for transformer in (policy.transformer, generator.transformer):
        place(transformer, backbone.device)

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

    for merging in (generator, *explorers):
        merging.merge_through(read, write)
    in_step = LockstepCommunicator(world, lambda: _take_part(sharded))
    generator.transformer.register_forward_pre_hook(lambda *_: in_step.before_forward())
    return in_step


def _shard_together(trained: nn.Module, served: nn.Module, mesh: DeviceMesh, ignored: set[nn.Parameter]) -> FSDPModule:
    """Shard a block of the policy, except its `ignored` weights, and that of its generator; return the latter."""
    names = {id(weight): name for name, weight in trained.named_parameters()}
    shared = {
        name: names[id(weight)]
        for name, weight in served.named_parameters()
        if id(weight) in names and _is_shared(weight, mesh.size())
    }
    fully_shard(trained, mesh=mesh, ignored_params=ignored, reshard_after_forward=True)
    sharded = fully_shard(served, mesh=mesh, reshard_after_forward=True)
    parts = dict(trained.named_parameters())
    for name, trained_name in shared.items():
        owner, _, attribute = name.rpartition(".")
        setattr(served.get_submodule(owner), attribute, parts[trained_name])
    return sharded


@torch.inference_mode()
def _take_part(blocks: Sequence[FSDPModule]) -> None:
    """Gather and free the weights of each block, as a pass does."""
    for block in blocks:
        block.unshard()
        block.reshard()
