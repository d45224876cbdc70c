"""`solrl-rollout memory`: a row for everything that a service holds, in units that fit."""

import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from solrl_core.families import load_backbone
from solrl_core.families.skeleton import load_skeleton
from solrl_core.memory_plan import modules_of, plan_memory, weight_bytes
from solrl_proto.identifiers import Precision
from solrl_rollout.__main__ import main
from solrl_rollout.engine.backends import load_backend
from solrl_rollout.settings import RolloutSettings, parse_model
from tests.support.small_model import small_model
from tests.support.typed import accepted, refused

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
EXPLORED_AND_REGENERATED: tuple[Precision, ...] = ("nvfp4", "bf16")


@pytest.mark.parametrize("precisions", [["nvfp4"], ["fp8", "bf16"]], ids=" ".join)
def test_no_row_of_a_small_model_reads_zero(precisions: list[str]) -> None:
    done = accepted(main, "memory", "--model", "mini-sana", "--precision", *precisions, COLUMNS="120")
    assert f"mini-sana, {' and '.join(precisions)}, " in done.stdout
    found = re.findall(r"[│|] (.+?) +[│|] +([\d.]+) (KiB|MiB|GiB) [│|]", done.stdout)
    sizes = {name: float(number) * UNITS[unit] for name, number, unit in found}
    total = sizes.pop("total (weights, prompts and the largest phase)")
    assert {"weights: transformer", "activations: decode"} <= sizes.keys()
    for precision in precisions:
        assert {f"weights: served, {precision}", f"activations: denoise, {precision}"} <= sizes.keys()
    assert all(size >= 1 for size in sizes.values())
    phases = [size for name, size in sizes.items() if name.startswith("activations")]
    held = [size for name, size in sizes.items() if not name.startswith("activations")]
    assert sum(held) + max(phases) == pytest.approx(total, rel=0.01)


@pytest.mark.slow
def test_several_precisions_share_the_clean_base() -> None:
    both, *alone = (
        plan_memory(load_skeleton(small_model()), precisions, 12)
        for precisions in (EXPLORED_AND_REGENERATED, *([one] for one in EXPLORED_AND_REGENERATED))
    )
    assert both.weights == alone[0].weights | alone[1].weights
    assert both.activations == alone[0].activations | alone[1].activations
    assert both.per_candidate == alone[0].per_candidate | alone[1].per_candidate
    assert max(plan.total for plan in alone) < both.total < sum(plan.total for plan in alone)
    assert 12 <= both.largest_batch(both.total) < min(plan.largest_batch(both.total) for plan in alone)


def test_the_plan_of_several_precisions_is_what_a_service_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """In BF16, as on a GPU."""
    monkeypatch.setattr("solrl_rollout.engine.backends.load_backbone", partial(load_backbone, dtype=torch.bfloat16))
    backend = load_backend(parse_model(small_model()), RolloutSettings(device="cpu"))
    for precision in EXPLORED_AND_REGENERATED:
        backend.set_adapter(precision, None)
    served = {f"served, {name}": generator.transformer for name, generator in backend._generators.items()}
    held = weight_bytes({**modules_of(backend.backbone), **served})
    # diffusers keeps some weights in float32.
    assert plan_memory(load_skeleton(small_model()), EXPLORED_AND_REGENERATED, 12).weights == pytest.approx(
        held, rel=0.01
    )


def test_the_plan_is_written_and_a_precision_counts_once(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    words = ("--precision", "bf16", "nvfp4", "bf16", "--out", str(out))
    accepted(main, "memory", "--model", small_model(), *words)
    weights = json.loads(out.read_text())["weights"]
    assert [name for name in weights if name.startswith("served")] == ["served, bf16", "served, nvfp4"]


def test_no_precision_is_refused() -> None:
    said = refused(main, "memory", "--model", "mini-sana", "--precision")
    assert "got --precision without a value; expected one or several" in said
