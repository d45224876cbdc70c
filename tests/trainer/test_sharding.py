"""A base sharded across the ranks, as far as one process can tell; `ranks/test_processes.py` has several."""

from collections.abc import Iterator

import pytest
import torch
from solrl_core.families import Backbone, load_backbone
from solrl_core.sampling.generator import Generator
from solrl_trainer.policy import sharding
from solrl_trainer.policy.policy import Policy
from solrl_trainer.policy.sharding import check_sharding, place, shard_base, sharded_bytes
from solrl_trainer.ranks.communicator import Communicator
from tests.trainer.training_helpers import Ranks, tiny_config
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

MIB = 2**20


def test_it_is_refused_where_it_cannot_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    config, cpu = tiny_config("optimizer.shard_base=true"), torch.device("cpu")
    with pytest.raises(ValueError, match=r"for one process; expected several ranks: start with torchrun"):
        check_sharding(config, cpu, Communicator())
    monkeypatch.setattr(sharding, "thread_count", lambda: 3)
    with pytest.raises(ValueError, match=r"on a CPU with 3 threads; expected one: set OMP_NUM_THREADS=1"):
        check_sharding(config, cpu, Ranks(0, 2))
    check_sharding(config, torch.device("cuda"), Ranks(0, 2))
    check_sharding(tiny_config(), cpu, Communicator())


class Model(nn.Module):
    """Two blocks of an adapted and another layer, and a layer outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList([nn.Linear(4, 8), nn.Linear(4, 6)]) for _ in range(2))
        self.out = nn.Linear(4, 10, bias=False)


def bytes_of(*counts: int) -> int:
    return 4 * sum(counts)


def test_each_rank_has_a_part_of_the_blocks_and_all_else() -> None:
    base, generator, explorer = Model(), Model(), Model()
    for number in range(2):
        for copied in (generator, explorer):  # all but the first layer of a block is shared with the base
            copied.blocks[number][1] = base.blocks[number][1]
            copied.blocks[number][0].bias = base.blocks[number][0].bias
    generator.out = explorer.out = base.out
    modules = {"transformer": base, "vae": nn.Linear(3, 3), "generator": generator, "explorer": explorer}
    found, gathered = sharded_bytes(modules, ["blocks"], 2)
    assert found == {
        "transformer": bytes_of(2 * 20, 2 * 15, 40),  # half of [8, 4] + [8] and of [6, 4] + [6], and the last layer
        "vae": bytes_of(9, 3),
        "generator": bytes_of(2 * 16),
        # Whole: the base has only a part of the weights that it would share.
        "explorer": bytes_of(2 * 40, 2 * 30),
    }
    assert gathered == 2 * bytes_of(40, 30)
    # Four parts of a weight with six rows are padded to two rows each, and the generator has a padded copy.
    found, _ = sharded_bytes(modules, ["blocks"], 4)
    assert found["transformer"] == bytes_of(2 * 10, 2 * 10, 40)
    assert found["generator"] == bytes_of(2 * 8, 2 * 10)


@pytest.fixture
def four_ranks() -> Iterator[Communicator]:
    """The first of four ranks, whose collectives do nothing."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401, registers the backend

    dist.init_process_group("fake", rank=0, world_size=4, store=dist.HashStore())
    yield Ranks(0, 4)
    dist.destroy_process_group()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["mini-flux", "mini-sd3", "mini-sana"])
def test_a_device_holds_what_the_plan_says(name: str, device: str, four_ranks: Communicator) -> None:
    torch._dynamo.reset()
    backbone = load_backbone(name, device=device, waiting=True)
    config = tiny_config("optimizer.shard_base=true", "optimizer.activation_checkpointing=1", "optimizer.encoders=cpu")
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    generator = Generator(backbone, "bf16")
    modules = {"transformer": backbone.transformer, "generator": generator.transformer}
    planned, gathered = sharded_bytes(modules, backbone.blocks, 4)
    policy = Policy(backbone, config.lora, config.seed)
    shard_base(backbone, generator, [], policy, four_ranks)
    own = set(policy.parameters)
    weights = [
        weight.to_local() if isinstance(weight, DTensor) else weight
        for transformer in (policy.transformer, generator.transformer)
        for weight in (*transformer.parameters(), *transformer.buffers())
        if weight not in own
    ]
    held = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in weights}
    assert sum(held.values()) == pytest.approx(sum(planned.values()), rel=0.01)
    assert all(weight.device == backbone.device for weight in weights)
    # As in a pass: gathering a block keeps the parts that are shared.
    for block in policy.blocks:
        block.unshard()
        block.reshard()
    again = {
        part.untyped_storage().data_ptr()
        for weight in (*policy.transformer.parameters(), *generator.transformer.parameters())
        if isinstance(weight, DTensor) and len(part := weight.to_local())
    }
    assert again <= held.keys()
    if device == "cuda":
        adapters = 2 * sum(weight.nbytes for weight in policy.parameters)
        most = sum(planned.values()) + adapters + 1.5 * gathered
        assert torch.cuda.max_memory_allocated() - before < most + MIB


@pytest.mark.gpu
def test_placed_weights_stay_shared(backbone: Backbone) -> None:
    generator = Generator(backbone, "bf16")
    shared = set(generator.transformer.parameters()) & set(backbone.transformer.parameters())
    place(generator.transformer, torch.device("cuda"))
    assert shared
    assert all(weight.is_cuda for weight in shared)
    assert shared == set(generator.transformer.parameters()) & set(backbone.transformer.parameters())
