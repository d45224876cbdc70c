"""`solrl-rollout check`: what it says of a sound model, and of one with outliers."""

import json
from pathlib import Path

import pytest
from solrl_core.families import load_backbone
from solrl_core.layer_list import kept_layers, write_layer_list
from solrl_engine.precision_check import FLOOR
from solrl_rollout.check import read_prompts
from solrl_rollout.cli import main
from tests.support.outlier_models import save_with_outliers
from tests.support.typed import accepted, refused

ATTENTION = "transformer_blocks.1.attn"
LAYER = f"{ATTENTION}.to_out.0"
SIZE = 1000.0


@pytest.fixture(scope="module")
def with_outliers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of mini-flux whose second block has outliers before its attention's last layer."""
    folder = tmp_path_factory.mktemp("models") / "flux"
    save_with_outliers(folder, ATTENTION, SIZE)
    return folder


@pytest.mark.slow
def test_a_sound_model_passes(tmp_path: Path) -> None:
    words = ("check", "mini-flux", "--precision", "nvfp4", "--groups", "2", "--candidates", "8", "--out", str(tmp_path))
    done = accepted(main, *words, COLUMNS="80")
    assert all(name in done.stdout for name in ("Spearman [95 %]", "worst's", "× BF16's speed")), done.stdout
    assert "equal up to rounding" in done.stdout
    found = json.loads((tmp_path / "check.json").read_text())
    assert found["pipeline_difference"] < 0.01
    assert all(one["ranks"] and one["layers"] is None for one in found["precisions"].values())
    assert not (tmp_path / "layers.json").exists()
    assert {folder.name for folder in tmp_path.iterdir() if folder.is_dir()} == {"bf16", "nvfp4"}


@pytest.mark.release
def test_outliers_are_noticed_found_and_served_around(with_outliers: Path, tmp_path: Path) -> None:
    words = ("check", str(with_outliers), "--precision", "fp8", "--groups", "4", "--out", str(tmp_path))
    done = accepted(main, *words, COLUMNS="200")  # with layers that are kept, it ranks
    found = json.loads((tmp_path / "check.json").read_text())
    fp8 = found["precisions"]["fp8"]
    (broken,) = fp8["measured"]["spearman"].values()
    (restored,) = fp8["restored"]["spearman"].values()
    assert broken["high"] < FLOOR < restored["mean"], (broken, restored)
    names = fp8["layers"]["names"]
    assert LAYER in names
    assert all(name.startswith(ATTENTION) for name in names), names
    assert f"solrl-rollout serve --model {with_outliers} --precision fp8 --layers" in done.stdout
    listed = kept_layers(tmp_path / "layers.json", found["transformer"], "flux")
    assert listed == {"fp8": tuple(names)}
    backbone = load_backbone(str(with_outliers), layers=tmp_path / "layers.json")
    assert LAYER not in backbone.policy_at("fp8").select(backbone.transformer)
    assert set(backbone.kept) == {"fp8"}


def test_a_layer_list_of_other_weights_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "layers.json"
    write_layer_list(file, "sha256:other", {"fp8": (LAYER,)})
    with pytest.raises(ValueError, match=r"transformers sha256:other; mini-flux has sha256:.*check mini-flux"):
        load_backbone("mini-flux", layers=file)
    file.write_text('{"transformers": {"sha256:a": {"fp7": []}}}')
    with pytest.raises(ValueError, match="expected a file of `solrl-rollout check`"):
        load_backbone("mini-flux", layers=file)


def test_prompts_are_of_a_file_or_a_set_and_there_are_enough_candidates(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("a cat\n\na dog\nan owl\n")
    assert [prompt.text for prompt in read_prompts(str(tmp_path / "mine.txt"), 2)] == ["a cat", "a dog"]
    assert len(read_prompts("shapes", 5)) == 5
    for words, said in (("--prompts nothing", "nothing"), ("--candidates 4", "expected at least 2 with 8")):
        assert said in refused(main, "check", "no-such-model", *words.split())
