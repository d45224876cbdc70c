"""`solrl-rollout memory`: a row for everything that a service holds, in units that fit."""

import re

import pytest
from solrl_rollout.cli import main
from typed import typed

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@pytest.mark.parametrize("precision", ["nvfp4", "bf16"])
def test_no_row_of_a_small_model_reads_zero(precision: str) -> None:
    done = typed(main, "memory", "--model", "mini-sana", "--precision", precision, COLUMNS="120")
    assert done.returncode == 0, done.stderr
    found = re.findall(r"[│|] (.+?) +[│|] +([\d.]+) (KiB|MiB|GiB) [│|]", done.stdout)
    sizes = {name: float(number) * UNITS[unit] for name, number, unit in found}
    total = sizes.pop("total (weights, prompts and the largest phase)")
    assert {"weights: transformer", "weights: served", "activations: decode"} <= sizes.keys()
    assert all(size >= 1 for size in sizes.values())
    phases = [size for name, size in sizes.items() if name.startswith("activations")]
    held = [size for name, size in sizes.items() if not name.startswith("activations")]
    assert sum(held) + max(phases) == pytest.approx(total, rel=0.01)
