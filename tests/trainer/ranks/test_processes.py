"""Several processes train one run: any number of them gives the same weights, bit for bit, by any algorithm."""

import json
from pathlib import Path

import pytest
from solrl_core.families import load_backbone
from tests.support.programs import RankPrograms
from tests.trainer.rank_programs import held_bytes, with_a_slow_rank, with_few_fitted_prompts
from tests.trainer.rank_runs import LAST, arguments, messages, run, same_weights
from tests.trainer.training_helpers import iterations, sets

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def together(alone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run that two processes started and three continued."""
    folder = tmp_path_factory.mktemp("together")
    assert run(2, arguments(folder, 1), folder / "log") == 0, (folder / "log").read_text()
    assert run(3, arguments(folder), folder / "log") == 0, (folder / "log").read_text()
    return folder


def test_two_processes_and_then_three_give_the_weights_of_one_bit_for_bit(alone: Path, together: Path) -> None:
    assert all(same_weights(together, alone, version) for version in range(1, LAST + 1))
    assert iterations(together) == iterations(alone)
    assert (together / "lora.safetensors").read_bytes() == (alone / "lora.safetensors").read_bytes()
    # Rank 0 alone prints.
    log = (together / "log").read_text()
    for line in ("loading /", "continuing after 1 iterations", "writing the report"):
        assert log.count(line) == (1 if line.startswith("continuing") else 2), log


def test_ranks_share_two_stages_without_a_service(tmp_path: Path) -> None:
    extra = ("rollout_url=null", "explore.precision=nvfp4")
    watched = ("evaluate.fidelity_prompts=2", "evaluate.fidelity_every=1")
    folders = {size: tmp_path / str(size) for size in (1, 2)}
    for size, folder in folders.items():
        words = arguments(folder, 2, *extra, *watched, recipe="sol_rl")
        assert run(size, words, tmp_path / "log") == 0, (tmp_path / "log").read_text()
    assert same_weights(folders[1], folders[2], 2)
    assert iterations(folders[1]) == iterations(folders[2])
    assert iterations(folders[1])[0]["precision"] == "nvfp4"
    results = [json.loads((folder / "result.json").read_text()) for folder in folders.values()]
    assert list(results[0]["spearman_by_version"]) == ["0", "1"]
    assert results[0]["spearman_by_version"] == results[1]["spearman_by_version"]


def test_all_ranks_stop_below_the_floor(tmp_path: Path) -> None:
    settings = ("rollout_url=null", "explore.steps=1", "explore.candidates=24", "evaluate.fidelity_floor=1")
    assert run(2, arguments(tmp_path / "run", 1, *settings, recipe="sol_rl"), tmp_path / "log") == 1
    (said,) = messages(tmp_path / "log")
    assert "the run stops before iteration 0" in said
    assert not list((tmp_path / "run" / "checkpoints").glob("*"))


def test_a_sharded_base_gives_the_same_weights(alone: Path, tmp_path: Path) -> None:
    """Three ranks have unequal numbers of prompts and micro-batches, so each waits in passes of the others."""
    words = arguments(tmp_path, 2, "optimizer.shard_base=true", "optimizer.activation_checkpointing=1")
    assert run(3, words, tmp_path / "log") == 0, (tmp_path / "log").read_text()
    assert "the base is sharded across 3 ranks" in (tmp_path / "log").read_text()
    assert same_weights(tmp_path, alone, 2)
    assert iterations(tmp_path) == iterations(alone)[:2]


def test_each_rank_holds_its_part_of_the_base_alone(tmp_path: Path) -> None:
    """test_sharding.py has the bytes of a part."""
    backbone, held = load_backbone("mini-sana"), {}
    blocks = [backbone.transformer.get_submodule(name) for name in backbone.blocks]
    base = sum(weight.nbytes for part in blocks for weight in part.parameters())
    for setting in ("true", "false"):
        given = (f"optimizer.shard_base={setting}", str(tmp_path / setting))
        code = RankPrograms(2, held_bytes, given, tmp_path / "log").wait(600)
        assert code == 0, (tmp_path / "log").read_text()
        held[setting] = [int((tmp_path / f"{setting}-{rank}").read_text()) for rank in range(2)]
    for spread, whole in zip(held["true"], held["false"], strict=True):
        # Half of the policy's weights, and half of those that the generator does not share with it: 0.78 of the base.
        assert whole - spread > 0.75 * base


def test_several_ranks_evaluate_like_one(alone: Path, together: Path, tmp_path: Path) -> None:
    words = ["evaluate", str(together), "--prompts", "3", "--seeds", "2", "--steps", "2"]
    assert run(2, words, tmp_path / "log") == 0, (tmp_path / "log").read_text()
    shared = json.loads((together / "evaluation" / "evaluation.json").read_text())
    assert run(1, [words[0], str(alone), *words[2:]], tmp_path / "log") == 0, (tmp_path / "log").read_text()
    own = json.loads((alone / "evaluation" / "evaluation.json").read_text())
    assert shared["rewards"]["clipscore"] == pytest.approx(own["rewards"]["clipscore"], abs=1e-6)
    assert (shared["prompts"], shared["version"]) == (3, LAST)


@pytest.mark.release
def test_several_ranks_calibrate_like_one(tmp_path: Path) -> None:
    words = ["calibrate", "--preset", "mini-sana/sol_rl/clipscore", "--prompts", "3", "--separation", "0.999"]
    words += ["--steps", "4", "--keep", "4", "--schedules", "1"]
    words += sets("explore.candidates=12", "explore.keep=4", "explore.steps=1")
    words += sets("explore.precision=nvfp4", "regenerate.steps=4")
    found = {}
    for size in (1, 2):
        output = tmp_path / str(size)
        code = run(size, [*words, "--output", str(output)], tmp_path / f"log-{size}", with_few_fitted_prompts)
        assert code == 0, (tmp_path / f"log-{size}").read_text()
        found[size] = json.loads((output / "calibration.json").read_text())
        assert (output / "plan.yaml").is_file()
    assert (found[2]["prompts"], len(found[2]["plans"])) == (3, 10)
    for own, shared in zip(found[1]["plans"], found[2]["plans"], strict=True):
        assert own["name"] == shared["name"]
        assert own["seconds"] > 0 < shared["seconds"]
        for figure in ("separation", "loss", "interval", "loss_interval", "spearman"):
            assert shared[figure] == pytest.approx(own[figure], abs=1e-3), own["name"]
    log = (tmp_path / "log-2").read_text()
    # Only the steps of the true scores themselves are perfect.
    assert found[1]["chosen"] == found[2]["chosen"] == "bf16 4 steps"
    for line in ("loading mini-sana", "frontier, ", "use it: "):
        assert log.count(line) == 1, log


def test_a_rank_that_waits_as_long_as_the_patience_fails_no_other(tmp_path: Path) -> None:
    words = arguments(tmp_path, 1, "patience=120")
    assert run(2, words, tmp_path / "log", with_a_slow_rank) == 0, (tmp_path / "log").read_text()


FIGURES = {
    "awm": {"ratio", "clipped", "error", "old_distance", "kl"},
    "dpo": {"accuracy", "margin", "tied", "error", "reference_error"},
}


@pytest.mark.parametrize("recipe", ["awm_two_stage", "dpo"])
def test_two_ranks_and_a_resumed_run_give_the_weights_of_one_bit_for_bit(recipe: str, tmp_path: Path) -> None:
    settings = ["optimizer.batch=3"]
    settings += ["rollout_url=null", "explore.precision=nvfp4"] if "two_stage" in recipe else ["explore.steps=4"]
    whole, shared, log = tmp_path / "whole", tmp_path / "shared", tmp_path / "log"
    for size, folder, count in ((1, whole, 2), (2, shared, 1), (1, shared, 2)):
        assert run(size, arguments(folder, count, *settings, recipe=recipe), log) == 0, log.read_text()
    assert same_weights(shared, whole, 1)
    assert same_weights(shared, whole, 2)
    found = iterations(whole)
    assert found == iterations(shared)
    algorithm = recipe.removesuffix("_two_stage")
    figures = {key.removeprefix("objective/") for line in found for key in line if key.startswith("objective/")}
    assert figures == FIGURES[algorithm]
    first, second = found
    assert first["loss"] != second["loss"]
    if algorithm == "awm":
        assert first["objective/ratio"] != 1
        assert 0 < first["objective/old_distance"] < 1
    else:
        assert first["objective/margin"] != 0
        assert 0 <= first["objective/accuracy"] <= 1
