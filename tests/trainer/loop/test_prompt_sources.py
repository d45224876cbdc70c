"""Runs with several sources of prompts."""

import json
from collections import Counter
from pathlib import Path

import pytest
from real_runs import Watcher
from solrl_minis import catalog
from solrl_trainer.loop import Result, train
from solrl_trainer.records.shown_log import shown_log
from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.preflight import check_run
from solrl_trainer.settings.presets import ConfigError, resolve
from training_helpers import TINY, iterations

SMALL = (
    *TINY,
    *("explore.prompts=4", "explore.candidates=4", "explore.keep=2", "explore.steps=2", "regenerate.steps=2"),
    *("evaluate.prompts=4", "evaluate.seeds=1", "evaluate.steps=2", "evaluate.rewards=[]"),
    "evaluate.fidelity_prompts=0",
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """The miniatures' prompts with and without the word red."""
    folder, rows = tmp_path_factory.mktemp("sources"), {}
    for split in ("train", "test"):
        rows[split] = [json.loads(line) for line in (catalog.prompts() / f"{split}_metadata.jsonl").open()]
        for name, red in (("red", True), ("others", False)):
            (folder / name).mkdir(exist_ok=True)
            own = [row for row in rows[split] if ("red" in row["prompt"]) is red]
            (folder / name / f"{split}_metadata.jsonl").write_text("\n".join(map(json.dumps, own)))
    return {str(folder / "red"): 1, str(folder / "others"): 3}


def config_of(output: Path, prompts: dict[str, float], *overrides: str) -> RunConfig:
    arguments = {"output": output, "run": output.name}
    settings = [*SMALL, f"prompts={json.dumps(prompts)}", *overrides]
    return resolve("mini-sana/sol_rl/clipscore", overrides=settings, arguments=arguments).config


def go(output: Path, prompts: dict[str, float], *overrides: str, resume: bool = False) -> tuple[Result, list[str]]:
    notes: list[str] = []
    with shown_log(notes.append):
        result = train(config_of(output, prompts, *overrides), Watcher(), resume=resume)
    return result, notes


@pytest.mark.slow
def test_a_run_draws_by_shares_and_resumes_in_the_same_order(sources: dict[str, float], tmp_path: Path) -> None:
    whole, notes = go(tmp_path / "whole", sources, "iterations=2")
    assert whole.samples is not None
    assert Counter("red" in prompt.text for prompt in whole.samples.prompts) == {True: 1, False: 3}
    assert Counter("red" in prompt for prompt in whole.prompts) == {True: 1, False: 3}
    assert any(note.startswith("prompts of an iteration: ") and "red 1 of " in note for note in notes)
    go(tmp_path / "parts", sources, "iterations=1")
    resumed, _ = go(tmp_path / "parts", sources, "iterations=2", resume=True)
    assert resumed.samples is not None
    assert [one.id for one in resumed.samples.prompts] == [one.id for one in whole.samples.prompts]
    assert iterations(tmp_path / "parts") == iterations(tmp_path / "whole")
    parts = json.loads((tmp_path / "whole" / "checkpoints" / "000002" / "parts.json").read_text())
    red, _ = sources
    assert f"prompts:train:{red}" in parts
    file = Path(red) / "train_metadata.jsonl"
    changed = file.read_text()
    file.write_text(changed + "\n" + json.dumps({"prompt": "a red square that is new"}))
    with pytest.raises(ValueError, match=rf"--allow-change prompts:train:{red}"):
        go(tmp_path / "parts", sources, "iterations=3", resume=True)
    file.write_text(changed)


def test_shares_that_cannot_be_drawn_are_refused(sources: dict[str, float], tmp_path: Path) -> None:
    red, others = sources
    with pytest.raises(ValueError, match=rf"prompts is 4, of which its share is 0: no prompt of {red}; expected"):
        check_run(config_of(tmp_path / "run", {red: 1, others: 99}), resume=False)
    (tmp_path / "few").mkdir()
    for split in ("train", "test"):
        (tmp_path / "few" / f"{split}.txt").write_text(f"a {split} prompt")
    few = str(tmp_path / "few")
    with pytest.raises(ValueError, match=rf"its share is 2, but {few} has 1 train prompts; expected more"):
        check_run(config_of(tmp_path / "run", {few: 1, others: 1}), resume=False)
    with pytest.raises(ConfigError, match=r"prompts.*greater than 0"):
        config_of(tmp_path / "run", {red: 0, others: 1})
