"""A run whose candidates do not rank stops, at its start and when it is resumed, and loses nothing."""

from pathlib import Path

import pytest
from solrl_core.errors import FidelityError
from solrl_trainer.evaluation import held_out
from solrl_trainer.loop import train
from solrl_trainer.settings.config import RunConfig
from tests.support.outlier_models import save_with_outliers
from tests.trainer.real_runs import Watcher
from tests.trainer.training_helpers import TINY, events, run_config

pytestmark = pytest.mark.slow

ATTENTION = "transformer_blocks.1.attn"
SMALL = (
    *TINY,
    *("rollout_url=null", "explore.precision=nvfp4", "explore.prompts=1", "explore.candidates=24"),
    *("explore.keep=4", "explore.steps=4", "evaluate.prompts=2", "evaluate.seeds=1", "evaluate.steps=1"),
    *("evaluate.fidelity_prompts=2", "evaluate.fidelity_every=1", "iterations=2"),
)


@pytest.fixture(scope="module")
def with_outliers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """mini-flux with outliers before a layer that is quantised at nvfp4."""
    folder = tmp_path_factory.mktemp("models") / "flux"
    save_with_outliers(folder, ATTENTION, 1e5, keep=[])
    return folder


def config_of(model: str | Path, output: Path, *overrides: str, recipe: str = "sol_rl") -> RunConfig:
    return run_config(f"mini-flux/{recipe}/clipscore", output, *SMALL, f"model={model}", *overrides)


def measured(folder: Path) -> list[int]:
    return [line["version"] for line in events(folder, "fidelity")]


@pytest.mark.parametrize("recipe", ["sol_rl", pytest.param("naive_quant", marks=pytest.mark.release)])
def test_a_model_with_outliers_stops_before_it_trains(with_outliers: Path, tmp_path: Path, recipe: str) -> None:
    config = config_of(with_outliers, tmp_path, recipe=recipe)
    with pytest.raises(FidelityError) as stopped:
        train(config, Watcher())
    said = str(stopped.value)
    assert "stops before iteration 0" in said
    assert "at evaluate.fidelity_floor; got 'Spearman " in said
    assert "of nvfp4 at 4 steps against BF16 at 4'; expected 'at least 0.3'" in said
    assert f"run `solrl-rollout check {with_outliers}`, and resume with another explore.precision or " in said
    assert not list((tmp_path / "checkpoints").glob("*"))


@pytest.mark.parametrize("recipe", ["sol_rl", pytest.param("naive_quant", marks=pytest.mark.release)])
def test_a_sound_model_trains(tmp_path: Path, recipe: str) -> None:
    result = train(config_of("mini-flux", tmp_path, "iterations=1", recipe=recipe), Watcher())
    assert measured(tmp_path) == [0]
    assert result.spearman[0] > 0.5


def test_saturation_is_no_bad_exploration(tmp_path: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_out, "LEAST_FIDELITY", 1.0)
    # Few of these images are right, so nearly all have the best score of a penalty on right ones.
    settings = ("rewards={verifier: -1}", "evaluate.fidelity_floor=1")
    config = config_of("mini-sana", tmp_path, *settings, "explore.precision=bf16", "explore.steps=2", "iterations=1")
    train(config, Watcher())
    (line,) = events(tmp_path, "fidelity")
    assert line["spearman"] < 0.8
    assert line["best_share"] > 0.5
    (note,) = [note for note in notes if "rank fidelity is below" in note]
    assert note.startswith("reward saturated: rank fidelity is below 1, ")
    assert f"because {100 * line['best_share']:.0f} % of a prompt's candidates share its best score" in note


@pytest.mark.release
def test_a_resumed_run_stops_again_until_something_is_changed(with_outliers: Path, tmp_path: Path) -> None:
    four = ("evaluate.prompts=4", "evaluate.fidelity_prompts=4")
    train(config_of(with_outliers, tmp_path, *four, "iterations=1", "evaluate.fidelity_floor=0"), Watcher())
    checkpoint = (tmp_path / "checkpoints" / "000001" / "state.safetensors").read_bytes()
    for _ in range(2):
        with pytest.raises(FidelityError, match="stops before iteration 1"):
            train(config_of(with_outliers, tmp_path, *four), Watcher(), resume=True)
    assert measured(tmp_path) == [0, 1, 1]
    assert (tmp_path / "checkpoints" / "000001" / "state.safetensors").read_bytes() == checkpoint
    result = train(config_of(with_outliers, tmp_path, *four, "explore.precision=bf16"), Watcher(), resume=True)
    assert measured(tmp_path) == [0, 1, 1, 1]
    assert result.spearman[1] > 0.5
