"""`solrl-rollout check`: what it says of a sound model, and of one with outliers."""

import json
from pathlib import Path

import pytest
from solrl_core.fidelity import RankCorrelation
from solrl_engine.precision_check import Measured
from solrl_rollout.__main__ import main
from solrl_rollout.check import read_prompts
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
    assert all(measured["ranks"] for measured in found["precisions"].values())
    assert {folder.name for folder in tmp_path.iterdir() if folder.is_dir()} == {"bf16", "nvfp4"}


@pytest.mark.slow
def test_outliers_are_noticed(with_outliers: Path, tmp_path: Path) -> None:
    words = ("check", str(with_outliers), "--precision", "fp8", "--groups", "4", "--out", str(tmp_path))
    done = typed(main, *words, COLUMNS="200")
    assert done.returncode == 1
    assert "does not rank at fp8: Spearman is below 0.6. Use another precision." in done.stdout
    found = json.loads((tmp_path / "check.json").read_text())
    assert [measured["ranks"] for measured in found["precisions"].values()] == [False]


@pytest.mark.slow
@pytest.mark.parametrize(("difference", "status"), [(None, 3), (0.5, 1)])
def test_too_few_prompts_decide_nothing_and_a_model_unlike_its_pipeline_fails(
    difference: float | None, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if difference is not None:
        monkeypatch.setattr("solrl_rollout.check.pipeline_difference", lambda *_: difference)
    words = ("check", "mini-flux", "--precision", "bf16", "--groups", "2", "--candidates", "8", "--steps", "2")
    done = typed(main, *words, "--true-steps", "4", COLUMNS="200")
    assert done.returncode == status, done.stderr
    assert ("NOT equal" in done.stdout) == (status == 1)
    assert "mini-flux is undecided at bf16: Spearman's interval contains 0.6. Raise --groups." in done.stdout


@pytest.mark.parametrize(
    ("intervals", "ranks"),
    [([(0.6, 0.9)], True), ([(0.6, 0.9), (0.5, 0.7)], None), ([(0.5, 0.7), (0.1, 0.5)], False), ([], None)],
)
def test_every_reward_that_ranks_in_bf16_has_to_rank(intervals: list[tuple[float, float]], ranks: bool | None) -> None:
    spearman = {str(at): RankCorrelation(sum(limits) / 2, *limits, 4) for at, limits in enumerate(intervals)}
    spearman["constant"] = RankCorrelation(0.0, -1.0, 1.0, 0)
    assert Measured("fp8", "native", spearman, {}, {}, 0.0, 0.0, 0.0, 1.0).ranks is ranks


def test_prompts_are_of_a_file_or_a_set_and_there_are_enough_candidates(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("a cat\n\na dog\nan owl\n")
    assert [prompt.text for prompt in read_prompts(str(tmp_path / "mine.txt"), 2)] == ["a cat", "a dog"]
    assert len(read_prompts("shapes", 5)) == 5
    for words, said in (("--prompts nothing", "nothing"), ("--candidates 4", "expected at least 2 with 8")):
        assert said in refused(main, "check", "no-such-model", *words.split())
