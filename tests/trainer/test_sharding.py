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


@pytest.fixture
def three_ranks() -> Iterator[Communicator]:
    """The first of three ranks, whose collectives do nothing."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401, registers the backend

    dist.init_process_group("fake", rank=0, world_size=3, store=dist.HashStore())
    yield Ranks(0, 3)
    dist.destroy_process_group()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["mini-flux", "mini-sd3", "mini-sana"])
def test_a_device_holds_what_the_plan_says(name: str, device: str, three_ranks: Communicator) -> None:
    torch._dynamo.reset()
    backbone = load_backbone(name, device=device, waiting=True)
    config = tiny_config("optimizer.shard_base=true", "optimizer.activation_checkpointing=1", "optimizer.encoders=cpu")
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    generator, explorer = Generator(backbone, "bf16"), Generator(backbone, "nvfp4")
    modules = {"transformer": backbone.transformer}
    modules |= {"generator": generator.transformer, "explorer": explorer.transformer}
    planned, gathered = sharded_bytes(modules, backbone.blocks, 3)
    blocks = [block for name in backbone.blocks for block in backbone.transformer.get_submodule(name).children()]
    assert gathered == 2 * max(sum(weight.nbytes for weight in block.parameters()) for block in blocks)
    policy = Policy(backbone, config.lora, config.seed)
    place(explorer.transformer, backbone.device)
    shard_base(backbone, generator, [explorer], policy, three_ranks)
    own = set(policy.parameters)
    weights = [
        weight.to_local() if isinstance(weight, DTensor) else weight
        for transformer in (policy.transformer, generator.transformer, explorer.transformer)
        for weight in (*transformer.parameters(), *transformer.buffers())
        if weight not in own
    ]
    held = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in weights}
    assert sum(held.values()) == pytest.approx(sum(planned.values()), rel=0.001)
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
