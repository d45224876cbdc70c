"""Runs with several sources of prompts."""

import json
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from solrl_core.rewards.trial import GREY
from solrl_minis import catalog
from solrl_trainer.commands.evaluate import evaluate_run
from solrl_trainer.commands.preflight import check_run
from solrl_trainer.commands.run import summarize
from solrl_trainer.loop import Result, train
from solrl_trainer.prompts.prompt_sets import read_prompts
from solrl_trainer.records.shown_log import shown_log
from solrl_trainer.run_folder.figures import TRAINED_SUM
from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.presets import ConfigError
from tests.support.service_helpers import running_service
from tests.support.small_model import small_model
from tests.trainer.real_runs import Watcher
from tests.trainer.training_helpers import QUICK, events, iterations, prompts_in, run_config

SMALL = (*QUICK, f"model={small_model()}", "explore.prompts=4", "evaluate.prompts=4")


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


def config_of(output: Path, prompts: Mapping[str, Any], *overrides: str) -> RunConfig:
    return run_config("mini-sana/sol_rl/clipscore", output, *SMALL, f"prompts={json.dumps(prompts)}", *overrides)


def go(output: Path, prompts: Mapping[str, Any], *overrides: str, resume: bool = False) -> tuple[Result, list[str]]:
    notes: list[str] = []
    with shown_log(notes.append):
        result = train(config_of(output, prompts, *overrides), Watcher(), resume=resume)
    return result, notes


@pytest.mark.slow
def test_a_run_draws_by_shares_and_resumes_in_the_same_order(sources: dict[str, float], tmp_path: Path) -> None:
    whole, notes = go(tmp_path / "whole", sources, "iterations=2")
    assert Counter("red" in prompt.text for prompt in whole.samples.prompts) == {True: 1, False: 3}
    assert Counter("red" in prompt for prompt in whole.prompts) == {True: 1, False: 3}
    assert any(note.startswith("prompts of an iteration: ") and "red 1 of " in note for note in notes)
    go(tmp_path / "parts", sources, "iterations=1")
    resumed, _ = go(tmp_path / "parts", sources, "iterations=2", resume=True)
    assert [one.id for one in resumed.samples.prompts] == [one.id for one in whole.samples.prompts]
    assert iterations(tmp_path / "parts") == iterations(tmp_path / "whole")
    parts = json.loads((tmp_path / "whole" / "checkpoints" / "000002" / "parts.json").read_text())
    red, _ = sources
    assert f"prompts:train:{red}" in parts


def test_shares_that_cannot_be_drawn_are_refused(sources: dict[str, float], tmp_path: Path) -> None:
    red, others = sources
    with pytest.raises(ValueError, match=rf"prompts is 4, of which its share is 0: no prompt of {red}; expected"):
        check_run(config_of(tmp_path / "run", {red: 1, others: 99}), resume=False)
    few = str(prompts_in(tmp_path / "few", ["a prompt"]))
    with pytest.raises(ValueError, match=rf"its share is 2, but {few} has 1 train prompts; expected more"):
        check_run(config_of(tmp_path / "run", {few: 1, others: 1}), resume=False)
    for given, text in (
        ({red: 0, others: 1}, rf"setting prompts .*: share of {red} is 0; Input should be greater than 0"),
        ({red: {"shar": 1}}, rf"shar of {red} is 1; Extra inputs"),
        ([red, others], r"got \['.*'\]; expected a prompt set, or several with their shares"),
        ({}, "expected a prompt set"),
    ):
        with pytest.raises(ConfigError, match=text):
            config_of(tmp_path / "run", given)


def redness(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """The red of images whose prompts ask for it; others fail."""
    assert all("red" in prompt or prompt == GREY for prompt in prompts)  # a service tries its rewards first
    return images[:, 0].mean((1, 2))


RED = f"{__name__}:redness"
OWN = (f"rewards={{clipscore: 1, '{RED}': 1}}", "evaluate.rewards=verifier", "iterations=1")


def rewarded(sources: Mapping[str, float]) -> dict[str, Any]:
    """The sources, of which only the red one has the reward of red, and only that."""
    red, others = sources
    return {red: {"share": 1, "rewards": {RED: 2.0}}, others: {"share": 3, "rewards": {"clipscore": 1.0}}}


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["sum", "gdpo"])
def test_prompts_of_one_run_have_different_rewards(aggregation: str, sources: dict[str, float], tmp_path: Path) -> None:
    config = config_of(tmp_path / "run", rewarded(sources), *OWN, f"algorithm.aggregation={aggregation}")
    check_run(config, resume=False)
    config.output.mkdir()
    (config.output / "config.json").write_text(config.model_dump_json())
    result = train(config, Watcher())
    for row, prompt in enumerate(result.samples.prompts):
        red, clip = (result.samples.rewards[name][row] for name in (RED, "clipscore"))
        has, lacks, weight = (red, clip, 2.0) if "red" in prompt.text else (clip, red, 1.0)
        assert lacks.isnan().all()
        assert torch.allclose(result.samples.scores[row], weight * has)
    (line,) = iterations(tmp_path / "run")
    assert set(line["shares"]) == {"clipscore", RED}
    assert min(line["shares"].values()) > 0
    assert line["weights"] == {"clipscore": 0.75, RED: 0.5}
    # Held out: 1 prompt of 4 is red, and the verifier judges all.
    before = result.before.scores
    assert [int((~before[name].isnan()).sum()) for name in ("clipscore", RED, "verifier")] == [3, 1, 4]
    rows = summarize(config, result)["rewards"]
    assert rows[TRAINED_SUM]["before"] == pytest.approx((3 * rows["clipscore"]["before"] + 2 * rows[RED]["before"]) / 4)
    (_, evaluated) = events(tmp_path / "run", "evaluation")
    assert evaluated["rewards"][TRAINED_SUM] == pytest.approx(rows[TRAINED_SUM]["after"])
    summary = evaluate_run(tmp_path / "run")
    assert summary["rewards"][RED]["after"] == pytest.approx(rows[RED]["after"], rel=1e-3)


@pytest.mark.slow
def test_a_service_scores_prompts_with_their_own_rewards(
    sources: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    with running_service("--rewards", "clipscore", RED, model=small_model()) as service:
        served = (*OWN, f"rollout_url={service.url}", "explore.lag=0", "evaluate.rewards=[]")
        config = config_of(tmp_path / "run", rewarded(sources), *served)
        check_run(config, resume=False)
        result = train(config, Watcher())
    found = {("red" in one.text): result.samples.scores[row] for row, one in enumerate(result.samples.prompts)}
    assert torch.equal(found[True] / 2, result.samples.rewards[RED][~result.samples.rewards[RED].isnan()])
    assert result.pairs is not None


def test_rewards_that_a_run_does_not_have_are_refused_with_the_prompt(tmp_path: Path) -> None:
    rows = [{"prompt": "a sign", "rewards": {"ocrr": 1.0}}]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked = ("explore.prompts=1", "rewards={ocr: 1, clipscore: 1}")
    with pytest.raises(ValueError, match=r"train.jsonl: prompt 'a sign' names the reward 'ocrr'.*did you mean.*'ocr'"):
        check_run(config_of(tmp_path / "run", {str(tmp_path): 1}, *asked), resume=False)
    for wrong in ({"ocr": 0}, {"ocr": "much"}, ["ocr"], {}):
        (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "a sign", "rewards": wrong}))
        with pytest.raises(ValueError, match=r"train.jsonl:1: got the rewards .*; expected weights by name"):
            read_prompts(tmp_path, "train")
    config = config_of(tmp_path / "run", {"shapes": {"share": 1, "rewards": {"orc": 1}}}, asked[1])
    with pytest.raises(ValueError, match=r"got the reward 'orc' of shapes.*expected some of the run's rewards: ocr, c"):
        check_run(config, resume=False)
