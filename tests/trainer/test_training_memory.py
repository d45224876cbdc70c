"""The memory plan: activations are counted without values, and blocks chosen to fit."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from solrl_core.families import load_backbone
from solrl_core.families.pipeline import PipelineBackbone
from solrl_trainer.memory import training_memory
from solrl_trainer.memory.training_memory import TrainingPlan, plan_training, wanted_blocks
from solrl_trainer.policy.lora import inject
from solrl_trainer.settings.config import Lora
from tiny_pipelines import write_z_image
from training_helpers import tiny_config

MIB = 2**20


def low_precision(name: str) -> PipelineBackbone:
    """A miniature with a GPU's dtypes."""
    backbone = load_backbone(name)
    assert isinstance(backbone, PipelineBackbone)
    backbone.transformer.bfloat16()
    backbone.dtype = torch.bfloat16
    return backbone


def kept_by(backbone: PipelineBackbone, lora: Lora, batch: int) -> int:
    """Bytes that all blocks keep for a gradient in eager mode."""
    transformer = copy.deepcopy(backbone.transformer)
    backbone.fuse(transformer)
    inject(transformer, backbone.lora_targets, lora.rank, lora.alpha)
    blocks = [block for name in backbone.blocks for block in transformer.get_submodule(name).children()]
    weights = {weight.untyped_storage().data_ptr() for weight in transformer.parameters()}
    saved: dict[int, torch.Tensor] = {}
    total = 0

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in weights:
            saved[x.untyped_storage().data_ptr()] = x
        return x

    def before(*_: Any) -> None:
        saved.clear()

    def after(*_: Any) -> None:
        nonlocal total
        total += sum(x.untyped_storage().nbytes() for x in saved.values())

    for block in blocks:
        block.register_forward_pre_hook(before)
        block.register_forward_hook(after)
    row = backbone.encode(["a"])
    rows = {name: value.expand(batch, *value.shape[1:]).contiguous() for name, value in row.items()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        latents = torch.randn(batch, *backbone.latent_shape)
        backbone.velocity(transformer, latents, torch.full((batch,), 0.5), rows)
    return total


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mini-flux", pytest.param("mini-sd3", marks=pytest.mark.release), "mini-sana"])
def test_activations_of_blocks_are_counted_without_values(name: str) -> None:
    backbone, lora = low_precision(name), Lora(rank=4, alpha=8)
    before = {key: value.clone() for key, value in backbone.transformer.state_dict().items()}
    plan = plan_training(backbone, lora, 8, backbone.encode(["a"]))
    after = backbone.transformer.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    blocks = sum(len(list(backbone.transformer.get_submodule(part).children())) for part in backbone.blocks)
    assert len(plan.kept) == len(plan.inputs) == blocks
    assert all(0 < inputs < kept for inputs, kept in zip(plan.inputs, plan.kept, strict=True))
    # A compiler recomputes cheap operations, so it keeps hardly more than eager mode, and at least half.
    eager = kept_by(backbone, lora, 8)
    assert 0.5 * eager < sum(plan.kept) < 1.1 * eager


def test_blocks_that_run_twice_with_guidance_keep_twice_as_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_memory, "_count", lambda *_: (7, 3))  # it compiles
    backbone, lora = load_backbone(str(write_z_image(tmp_path / "z-image"))), Lora(rank=4, alpha=8)
    once, twice = (plan_training(backbone, lora, 2, backbone.encode(["a"], scale), scale) for scale in (1.0, 3.0))
    assert (once.kept, once.inputs) == ((7,) * 4, (3,) * 4)
    assert (twice.kept, twice.inputs) == ((14,) * 4, (6,) * 4)


def test_the_fewest_blocks_that_fit_recompute() -> None:
    plan = TrainingPlan(kept=(10 * MIB,) * 4, inputs=(MIB,) * 4, state=5 * MIB)
    assert plan.total(0) == (5 + 40 + 10) * MIB
    assert plan.total(1) == (5 + 1 + 30 + 20) * MIB
    assert plan.total(4) == (5 + 4 + 20) * MIB
    assert plan.checkpointed(plan.total(0)) == 0
    assert plan.checkpointed(plan.total(0) - 1) == 2
    assert plan.checkpointed(plan.total(3)) == 3
    assert plan.checkpointed(0) == 4


@pytest.mark.parametrize(("setting", "expected"), [("auto", None), ("false", 0), ("true", 5), ("2", 2), ("99", 5)])
def test_a_runs_setting_overrides_the_plan(setting: str, expected: int | None) -> None:
    assert wanted_blocks(tiny_config(f"optimizer.activation_checkpointing={setting}"), 5) == expected


def test_a_plan_is_proportional_to_the_micro_batch() -> None:
    plan = TrainingPlan(kept=(10 * MIB,) * 4, inputs=(MIB,) * 4, state=5 * MIB)
    assert plan.scaled(0.5) == TrainingPlan(kept=(5 * MIB,) * 4, inputs=(MIB // 2,) * 4, state=5 * MIB)


@torch._dynamo.config.patch(recompile_limit=1, accumulated_recompile_limit=1)
def test_one_process_may_plan_any_number_of_micro_batches() -> None:
    """Bytes are proportional to the rows of the batch."""
    backbone, lora = low_precision("mini-sana"), Lora(rank=4, alpha=8)
    row = backbone.encode(["a"])
    whole, part = (sum(plan_training(backbone, lora, batch, row).kept) for batch in (32, 3))
    assert part == pytest.approx(whole * 3 / 32, rel=0.05)
