"""Scores that several processes measure."""

import argparse
from pathlib import Path

import pytest
import support.plan_parts
import torch
from safetensors.torch import load_file, save_file
from support.plan_parts import join, measure_in_parts, stretches

SCRIPT = """
import sys
from pathlib import Path
import torch
from safetensors.torch import save_file
at = sys.argv.index("--stretch")
first, last = map(int, sys.argv[at + 1 : at + 3])
folder = Path(sys.argv[sys.argv.index("--scores") + 1])
assert (folder / "solver.json").read_text() == "a solver"
if (folder / "broken").exists():
    sys.exit("broken")
scores = {"true": torch.arange(first, last)[:, None].float()}
if first == 0:
    scores["off"] = torch.zeros(2, 1)
for number in range(first, last):
    print("a model", number, flush=True)
save_file(scores, folder / "scores.safetensors")
"""


@pytest.mark.parametrize(
    ("begun", "prompts", "jobs", "expected"),
    [
        (0, 5, 2, [(0, 2), (2, 5)]),
        (3, 5, 1, [(3, 5)]),
        (4, 6, 4, [(4, 5), (5, 6)]),
        (5, 5, 2, []),
    ],
)
def test_processes_share_the_prompts_evenly(
    begun: int, prompts: int, jobs: int, expected: list[tuple[int, int]]
) -> None:
    assert stretches(begun, prompts, jobs) == expected


def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[argparse.Namespace, Path, Path]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr(support.plan_parts, "SCRIPT", script)
    solver = tmp_path / "solver.json"
    solver.write_text("a solver")
    settings = {"jobs": 2, "prompts": 5, "candidates": 96, "solver": "preset", "device": "cpu", "precisions": ["fp8"]}
    return argparse.Namespace(**settings), solver, tmp_path / "scores.safetensors"


def test_scores_of_all_processes_are_joined_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args, solver, file = given(tmp_path, monkeypatch)
    measure_in_parts("a model", 5, args, solver, file)
    scores = load_file(file)
    assert scores["true"].flatten().tolist() == [0, 1, 2, 3, 4]
    assert scores["off"].shape == (2, 1)
    measure_in_parts("a model", 7, args, solver, file)  # two more
    assert load_file(file)["true"].flatten().tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert load_file(file)["off"].shape == (2, 1)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_a_failed_process_is_named_and_the_others_scores_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args, solver, file = given(tmp_path, monkeypatch)
    broken = tmp_path / "scores.2-5"
    broken.mkdir()
    (broken / "broken").touch()
    with pytest.raises(SystemExit, match=r"1 of 2 processes failed, see .*scores\.2-5/log; run the command again"):
        measure_in_parts("a model", 5, args, solver, file)
    assert not file.exists()
    assert len(load_file(tmp_path / "scores.0-2/scores.safetensors")["true"]) == 2
    assert (broken / "log").read_text() == "broken\n"


def test_nothing_is_joined_to_nothing(tmp_path: Path) -> None:
    join([], tmp_path / "scores")
    assert not (tmp_path / "scores").exists()
    save_file({"true": torch.ones(1, 2)}, tmp_path / "one")
    join([tmp_path / "one"], tmp_path / "scores")
    assert load_file(tmp_path / "scores")["true"].tolist() == [[1, 1]]
