"""A base sharded across the ranks, as far as one process can tell; `ranks/test_processes.py` has several."""

import pytest
import torch
from solrl_core.families import Backbone
from solrl_core.generator import Generator
from solrl_trainer import sharding
from solrl_trainer.sharding import check_sharding, place, sharded_bytes
from solrl_trainer.world import SoloWorld
from torch import nn
from training_helpers import tiny_config


class Two:
    """Two ranks."""

    rank, size, local_rank = 0, 2, 0


def test_it_is_refused_where_it_cannot_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    config, cpu = tiny_config("optimizer.shard_base=true"), torch.device("cpu")
    with pytest.raises(ValueError, match=r"for one process; expected several ranks: start with torchrun"):
        check_sharding(config, cpu, SoloWorld())
    monkeypatch.setattr(sharding, "lane_count", lambda: 3)
    with pytest.raises(ValueError, match=r"on a CPU with 3 threads; expected one: set OMP_NUM_THREADS=1"):
        check_sharding(config, cpu, Two())  # type: ignore[arg-type]
    check_sharding(config, torch.device("cuda"), Two())  # type: ignore[arg-type]
    check_sharding(tiny_config(), cpu, SoloWorld())


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_placed_weights_stay_shared(backbone: Backbone) -> None:
    generator = Generator(backbone, "bf16")
    shared = set(generator.transformer.parameters()) & set(backbone.transformer.parameters())
    place(generator.transformer, torch.device("cuda"))
    assert shared
    assert all(weight.is_cuda for weight in shared)
    assert shared == set(generator.transformer.parameters()) & set(backbone.transformer.parameters())
