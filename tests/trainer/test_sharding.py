"""Whether a run spreads its base over the ranks; `ranks/test_processes.py` does so with processes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from solrl_core.families import Backbone
from solrl_core.generator import Generator
from solrl_trainer import sharding
from solrl_trainer.sharding import freed_bytes, is_sharded
from solrl_trainer.training_memory import TrainingPlan
from solrl_trainer.world import SoloWorld
from training_helpers import tiny_config

PLAN = TrainingPlan(kept=(100, 100), inputs=(10, 10), state=30)
"""Takes 250 bytes if both blocks are recomputed."""


class Two:
    """Two ranks, of which the other has this much to say."""

    rank, size, local_rank = 0, 2, 0

    def __init__(self, other: bool = False) -> None:
        self._other = torch.frombuffer(bytearray(str(other).lower().encode()), dtype=torch.uint8)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor, self._other]


def backbone_on(device: str) -> Any:
    return SimpleNamespace(device=torch.device(device))


@pytest.mark.parametrize(
    ("free", "other", "expected"), [(250, False, False), (249, False, True), (250, True, True)], ids=str
)
def test_auto_spreads_what_does_not_fit_on_some_rank(
    free: int, other: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharding, "run_plan", lambda config, backbone: (PLAN, free))
    assert is_sharded(tiny_config(), backbone_on("cuda"), Two(other)) is expected
    assert not is_sharded(tiny_config(), backbone_on("cuda"), SoloWorld())
    assert not is_sharded(tiny_config(), backbone_on("cpu"), Two(other))
    assert not is_sharded(tiny_config("optimizer.shard_base=false"), backbone_on("cuda"), Two(other))
    assert is_sharded(tiny_config("optimizer.shard_base=true"), backbone_on("cuda"), Two(other))


def test_it_is_refused_where_it_cannot_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config("optimizer.shard_base=true")
    with pytest.raises(ValueError, match=r"for one process; expected several ranks: start with torchrun"):
        is_sharded(config, backbone_on("cpu"), SoloWorld())
    monkeypatch.setattr(sharding, "lane_count", lambda: 3)
    with pytest.raises(ValueError, match=r"on a CPU with 3 threads; expected one: set OMP_NUM_THREADS=1"):
        is_sharded(config, backbone_on("cpu"), Two())


def test_what_it_frees_grows_with_the_ranks(backbone: Backbone) -> None:
    generator = Generator(backbone, "bf16")
    freed = [freed_bytes(backbone, generator, size) for size in (2, 4, 8)]
    blocks = [
        weight for block in backbone.transformer.get_submodule("transformer_blocks") for weight in block.parameters()
    ]
    assert freed == sorted(freed)
    assert freed[2] < 2 * sum(weight.nbytes for weight in blocks)
