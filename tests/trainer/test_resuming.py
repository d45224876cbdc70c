"""What may change when a run is resumed: each rule, what a refusal says, and resumed runs with changes."""

import json
import linecache
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from solrl_core.model_options import ModelOptions
from solrl_trainer.__main__ import main
from solrl_trainer.run_folder.checkpoints import Checkpoint
from solrl_trainer.run_folder.resuming import check, check_names, parts_before_loading, parts_when_loaded
from tests.support.small_model import small_model
from tests.support.typed import accepted, refused
from tests.trainer.training_helpers import QUICK, events, prompts_in, sets, tiny_config

PARTS = {
    "prompts:train": "sha256:1",
    "model:vae": "sha256:2",
    "rewards:clipscore": "sha256:3",
    "libraries:torch": "2.0",
}
STORED = Checkpoint(Path("runs/one/checkpoints/000007"), 7, tiny_config("iterations=9"), PARTS, {}, {})


def changed(*overrides: str, parts: dict[str, str] | None = None, allowed: tuple[str, ...] = ()) -> list[str]:
    return list(map(str, check(STORED, tiny_config("iterations=9", *overrides), PARTS | (parts or {}), allowed)))


FREE = (
    *("iterations=999", "rollout_url=http://elsewhere", "device=cpu", "output=moved", "evaluate.prompts=1"),
    *("checkpoint_every=7", "keep_checkpoints=1", "optimizer.encoders=cpu", "optimizer.activation_checkpointing=true"),
    "reward_options={clipscore: {at: 'http://elsewhere'}}",
)
LATER = {
    "optimizer.learning_rate=0.5": "optimizer.learning_rate: 0.001 → 0.5",
    "explore.candidates=48": "explore.candidates: 96 → 48",
    "algorithm.beta=0.25": "algorithm.beta: 1.0 → 0.25",
    "policy.decay_max=0": "policy.decay_max: 0.5 → 0.0",
    "regenerate.steps=3": "regenerate.steps: 4 → 3",
}


@pytest.mark.parametrize("override", [*FREE, *LATER])
def test_settings_of_later_iterations_may_change_and_those_without_an_effect_silently(override: str) -> None:
    assert changed(override) == ([LATER[override]] if override in LATER else [])


@pytest.mark.parametrize(
    ("override", "said", "name"),
    [
        ("seed=1", "seed: 42 → 1", "seed"),
        ("prompts=elsewhere", "prompts: shapes → elsewhere", "prompts"),
        ("guidance=2", "guidance: 1.0 → 2.0", "guidance"),
        ("revision=v2", "revision: null → v2", "revision"),
        ("rewards={clipscore: 2}", "rewards.clipscore: 1.0 → 2.0", "rewards"),
    ],
)
def test_other_settings_change_only_by_name(override: str, said: str, name: str) -> None:
    with pytest.raises(ValueError, match="stored → asked") as raised:
        changed(override)
    assert str(raised.value) == (
        f"runs/one/checkpoints/000007 is of a run with (stored → asked) {said}. Undo what is not meant, and allow the "
        f"rest by name: --allow-change {said.partition(':')[0]}"
    )
    assert changed(override, allowed=(name,)) == [said]


@pytest.mark.parametrize("part", PARTS)
def test_what_a_run_depends_on_changes_only_by_name(part: str) -> None:
    other, said = {part: "other"}, f"{part}: {PARTS[part]} → other"
    with pytest.raises(ValueError, match=rf"\(stored → asked\) {said}\. .*--allow-change {part}$"):
        changed(parts=other)
    with pytest.raises(ValueError, match=said):
        changed(parts=other, allowed=("seed", "libraries:numpy", part[:-1]))
    for name in (part, part.partition(":")[0]):
        assert changed(parts=other, allowed=(name,)) == [said]
    # Settings say which rewards are used, and those that only evaluate may change.
    assert changed(parts={"rewards:new": "sha256:4"}) == []


@pytest.mark.parametrize("part", ["libraries:transformer-engine", "model:text_encoder_2"])
def test_an_added_or_a_lost_library_or_part_of_the_model_is_a_change(part: str) -> None:
    with pytest.raises(ValueError, match=rf"{part}: null → 3\.0\. .*--allow-change {part}$"):
        check(STORED, STORED.config, PARTS | {part: "3.0"}, ())
    with pytest.raises(ValueError, match=rf"{part}: 3\.0 → null\. .*--allow-change {part}$"):
        check(replace(STORED, parts=PARTS | {part: "3.0"}), STORED.config, PARTS, ())
    prompts = {name: value for name, value in PARTS.items() if name.startswith("prompts")}
    assert check(STORED, STORED.config, prompts, ()) == [], "before anything is loaded, the rest is not known"


@pytest.mark.parametrize("override", ["run=other", "lora.rank=4", "lora.alpha=1", "explore.lag=1", "explore.lag=null"])
def test_some_settings_can_never_change(override: str) -> None:
    name = override.partition("=")[0]
    with pytest.raises(ValueError, match=rf"{name}: .* → .*\. {name} cannot change: start a new run with "):
        changed(override, allowed=(name,))


def test_all_differences_are_shown_at_once_and_impossible_names_refused() -> None:
    with pytest.raises(ValueError, match="stored → asked") as raised:
        changed("seed=1", "lora.rank=4", "optimizer.learning_rate=0.5", parts={"prompts:train": "sha256:" + 64 * "f"})
    shown = "lora.rank: 2 → 4; seed: 42 → 1; prompts:train: sha256:1 → sha256:"
    assert shown in str(raised.value)
    assert str(raised.value).endswith("--allow-change seed --allow-change prompts:train")
    assert "learning_rate" not in str(raised.value)
    check_names(["prompts", "prompts:train", "rewards.clipscore", "optimizer", "libraries:torch"])
    with pytest.raises(ValueError, match=r"got --allow-change library \(did you mean 'libraries'\?\)"):
        check_names(["library"])


def test_both_splits_with_their_metadata_and_the_libraries_count(tmp_path: Path) -> None:
    rows = {"train": {"prompt": "a red circle", "tag": 1}, "test": {"prompt": "a blue square", "tag": 1}}
    config = tiny_config(f"prompts={tmp_path}")

    def parts() -> dict[str, str]:
        for split, row in rows.items():
            (tmp_path / f"{split}_metadata.jsonl").write_text(json.dumps(row) + "\n")
        return parts_before_loading(config)

    before = parts()
    assert {"libraries:solrl", "libraries:torch", "libraries:diffusers", "libraries:transformers"} < before.keys()
    for split in rows:
        rows[split]["tag"] = 2
        after = parts()
        assert {name for name in after if after[name] != before[name]} == {f"prompts:{split}"}
        before = after


def test_an_algorithm_of_another_package_counts_by_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert not [part for part in parts_before_loading(tiny_config()) if part.startswith("algorithm")]

    def digest(body: str) -> str:
        (tmp_path / "gentle.py").write_text(ALGORITHM.format(body))
        sys.modules.pop("gentle", None)
        linecache.checkcache()
        return parts_before_loading(tiny_config("algorithm.name=gentle:Gentle"))["algorithm:gentle:Gentle"]

    try:
        first = digest("1.0")
        assert digest("0.5") != first
        assert digest("1.0") == first
    finally:
        sys.modules.pop("gentle", None)


def test_a_models_own_settings_count_but_not_the_places_of_its_rewards() -> None:
    def digest(options: ModelOptions) -> str:
        return parts_when_loaded(tiny_config(), {}, options, {})["model:solrl.json"]

    plain = digest(ModelOptions())
    assert digest(ModelOptions(rewards={"clipscore": {"model": "/elsewhere"}})) == plain
    for options in (ModelOptions(complex_human_instruction=["be brief"]), ModelOptions(keep=("proj_out",))):
        assert digest(options) != plain


ALGORITHM = """from solrl_trainer.algorithms.diffusionnft import DiffusionNft


class Gentle(DiffusionNft):
    strength = {}
"""
REWARD = "def redness(images, prompts, metadata):\n    return images[:, 0].mean((1, 2)){}\n"


def resumed(folder: Path, *words: str) -> Any:
    return accepted(main, "run", "--resume", str(folder), *words)


def refusal(folder: Path, *words: str) -> str:
    return refused(main, "run", "--resume", str(folder), *words)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two iterations, its prompts beside it."""
    place = tmp_path_factory.mktemp("resuming")
    words = sets(*QUICK, f"model={small_model()}", "evaluate.rewards=redness:redness")
    words += sets(f"prompts={prompts_in(place / 'prompts')}")
    preset = ("--preset", "mini-sana/naive_scaling/clipscore", "--output", str(place / "run"), "--iterations", "2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(place), *sys.path])
        (place / "redness.py").write_text(REWARD.format(""))
        accepted(main, "run", *preset, *words)
    return place


@pytest.fixture
def folder(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run, whose settings still name the first one's prompts."""
    monkeypatch.setattr(sys, "path", [str(finished), *sys.path])
    shutil.copytree(finished / "run", tmp_path / "run")
    return tmp_path / "run"


def test_a_changed_learning_rate_is_noted_in_the_runs_history(folder: Path) -> None:
    done = resumed(folder, "--iterations", "3", "--set", "optimizer.learning_rate=0.5")
    assert "changed after version 2: optimizer.learning_rate: 0.001 → 0.5" in done.stderr + done.stdout
    (change,) = events(folder, "change")
    assert (change["version"], change["changes"]) == (2, {"optimizer.learning_rate": [0.001, 0.5]})
    # From version 2 again: the first attempt's note goes with its iteration.
    resumed(folder, "--checkpoint", "2", "--iterations", "3", "--set", "optimizer.learning_rate=0.25")
    (change,) = events(folder, "change")
    assert change["changes"] == {"optimizer.learning_rate": [0.001, 0.25]}
    assert [line["version"] for line in events(folder, "iteration")] == [1, 2, 3]


def test_fewer_iterations_leave_the_history_as_it_is(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}
    said = refusal(folder, "--iterations", "1")
    assert "has finished 2 iterations, but iterations is 1; expected at least 2" in said
    assert {path: path.read_bytes() for path in before} == before
    resumed(folder, "--iterations", "1", "--checkpoint", "1")
    assert json.loads((folder / "result.json").read_text())["iterations"] == 1
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["000001"]


def test_other_prompts_and_rewards_are_refused_unless_allowed(folder: Path, finished: Path) -> None:
    train, reward = finished / "prompts" / "train.txt", finished / "redness.py"
    texts = {path: path.read_text() for path in (train, reward)}
    try:
        train.write_text("a red circle\nthree blue squares\n")
        for words in ([], ["--dry-run"], ["--allow-change", "libraries"]):
            said = refusal(folder, "--iterations", "3", *words)
            assert "prompts:train: sha256:" in said
            assert "prompts:test" not in said
        # The same command in a new process, where the reward's code is other code.
        reward.write_text(REWARD.format(" / 2"))
        sys.modules.pop("redness")
        said = refusal(folder, "--iterations", "3", "--allow-change", "prompts")
        assert "(stored → asked) rewards:redness:redness: sha256:" in said
        assert said.endswith("--allow-change rewards:redness:redness\n")
        resumed(folder, "--iterations", "3", "--allow-change", "prompts", "--allow-change", "rewards")
        resumed(folder)  # the new checkpoint has the new parts
    finally:
        for path, text in texts.items():
            path.write_text(text)
        sys.modules.pop("redness")
