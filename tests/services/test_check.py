"""`solrl-rollout check`: what it says of a sound model, and of one with outliers."""

import json
from pathlib import Path

import pytest
from solrl_rollout.check import read_prompts
from solrl_rollout.cli import main
from tests.support.outlier_models import save_with_outliers
from tests.support.typed import accepted, refused, typed


@pytest.fixture(scope="module")
def with_outliers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of mini-flux whose second block has outliers before its attention's last layer."""
    folder = tmp_path_factory.mktemp("models") / "flux"
    save_with_outliers(folder, "transformer_blocks.1.attn", 1000.0)
    return folder


@pytest.mark.slow
def test_a_sound_model_passes(tmp_path: Path) -> None:
    words = ("check", "mini-flux", "--precision", "nvfp4", "--groups", "2", "--candidates", "8", "--out", str(tmp_path))
    done = accepted(main, *words, COLUMNS="80")
    assert all(name in done.stdout for name in ("Spearman [95 %]", "worst's", "× BF16's speed")), done.stdout
    assert "equal up to rounding" in done.stdout
    found = json.loads((tmp_path / "check.json").read_text())
    assert found["pipeline_difference"] < 0.01
    assert all(one["ranks"] for one in found["precisions"].values())
    assert {folder.name for folder in tmp_path.iterdir() if folder.is_dir()} == {"bf16", "nvfp4"}


@pytest.mark.slow
def test_outliers_are_noticed(with_outliers: Path, tmp_path: Path) -> None:
    words = ("check", str(with_outliers), "--precision", "fp8", "--groups", "4", "--out", str(tmp_path))
    done = typed(main, *words, COLUMNS="200")
    assert done.returncode == 1
    assert "does not rank at fp8: Spearman is below 0.6. Use another precision." in done.stdout
    found = json.loads((tmp_path / "check.json").read_text())
    assert [one["ranks"] for one in found["precisions"].values()] == [False]


def test_prompts_are_of_a_file_or_a_set_and_there_are_enough_candidates(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("a cat\n\na dog\nan owl\n")
    assert [prompt.text for prompt in read_prompts(str(tmp_path / "mine.txt"), 2)] == ["a cat", "a dog"]
    assert len(read_prompts("shapes", 5)) == 5
    for words, said in (("--prompts nothing", "nothing"), ("--candidates 4", "expected at least 2 with 8")):
        assert said in refused(main, "check", "no-such-model", *words.split())
