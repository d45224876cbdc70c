"""Runs that end before their last iteration, and export their best checkpoint."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from solrl_trainer.commands.compare import compare
from solrl_trainer.commands.export import export
from solrl_trainer.commands.preflight import check_run
from solrl_trainer.commands.run import run
from solrl_trainer.evaluation.stopping import reason_to_stop
from solrl_trainer.records.progress import result_table
from solrl_trainer.records.run_log import RunLog
from solrl_trainer.report.page import write_report
from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.presets import ConfigError, resolve
from tests.support.small_model import small_model
from tests.trainer.rank_runs import run as run_ranks
from tests.trainer.real_runs import Service, go
from tests.trainer.training_helpers import QUICK, events, iterations, prompts_in, redness, run_config, sets, state

PLANNED, GUARD, LEVEL = (f"{__name__}:{name}" for name in ("planned", "guard", "level"))
GREEN, RED = "a green cross", "a red circle"
PLANS = {GREEN: (0.1, 0.2, 0.5, 0.9, 0.9, 0.9), RED: (0.1, 0.2, 0.5, 0.05, 0.05, 0.05)}
"""Prompt → reward by version: its mean is highest at version 2, and nothing is certain from version 3 on."""
FOLDER = {"of the run": Path()}
LOCAL = (*QUICK, f"model={small_model()}", "rollout_url=null", "evaluate.every=1", "evaluate.stop_after=0.4")


def version() -> int:
    """The version that an evaluation along the run is of: that of the newest checkpoint."""
    return max((int(path.name) for path in (FOLDER["of the run"] / "checkpoints").glob("0*")), default=0)


def planned(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Any]) -> torch.Tensor:
    """What is planned for the held-out prompts; redness for the others, which are trained on."""
    red = redness(images, [], []).tolist()
    return torch.tensor([PLANS[p][version()] if p in PLANS else r for p, r in zip(prompts, red, strict=True)])


def guard(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Any]) -> torch.Tensor:
    """A reward that falls at version 2."""
    return torch.full((len(prompts),), float(version() < 2))


def level(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Any]) -> torch.Tensor:
    return torch.full((len(prompts),), 0.5)


def lora_of(folder: Path, version: int) -> torch.Tensor:
    """The averaged weights of a checkpoint, as they are exported."""
    tensors = state(folder, version)
    return torch.cat([tensors[name].flatten() for name in sorted(tensors) if name.startswith("averaged/")])


def exported(folder: Path) -> torch.Tensor:
    tensors = load_file(folder / "lora.safetensors")
    # lora_B is multiplied by alpha / rank.
    scaled = {name: tensor / 2 if "lora_B" in name else tensor for name, tensor in tensors.items()}
    return torch.cat([scaled[name].flatten() for name in sorted(scaled)])


@pytest.mark.slow
def test_a_run_ends_at_its_plateau_and_exports_its_best_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = FOLDER["of the run"] = tmp_path / "run"
    prompts = prompts_in(tmp_path / "prompts", train=("a blue square", "a cyan cross"), test=(GREEN, RED))
    overrides = (f"prompts={prompts}", f"rewards={{'{PLANNED}': 1}}", "evaluate.prompts=2", "checkpoint_every=1000")
    config = run_config("mini-sana/sol_rl/clipscore", output, *LOCAL, *overrides, "iterations=5")
    reason = "no new best held-out reward in 2 iterations, since 0.5000 at version 2"
    end = f"ended after 4 of 5 iterations: {reason}; the weights are of version 2"

    def ended(result: dict[str, Any]) -> None:
        expected = {"iterations": 4, "planned": 5, "version": 2, "stopped": reason}
        assert result | expected == result
        assert torch.allclose(exported(output), lora_of(output, 2))
        assert not torch.allclose(exported(output), lora_of(output, 4))
        for name in ("report.html", "README.md"):
            assert end in (output / name).read_text()
        assert "not finished" not in (output / "report.html").read_text()

    reported: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "ended", lambda _, why: reported.append(why))
        first = run(config)
    assert reported == [reason]
    ended(first)
    console = Console(width=200, record=True)
    console.print(result_table(first))
    assert end in console.export_text()
    assert "0.1000 → 0.5000" in (compare([output]), capsys.readouterr().out)[1]
    # A later export takes the best, too, unless it names another.
    export(config, folder=tmp_path / "other")
    assert (tmp_path / "other/lora.safetensors").read_bytes() == (output / "lora.safetensors").read_bytes()
    export(config, 4, tmp_path / "other")
    assert (tmp_path / "other/lora.safetensors").read_bytes() != (output / "lora.safetensors").read_bytes()

    # Resumed, it ends again at once, for the same reason.
    lines = iterations(output)
    ended(run(config, resume=True))
    assert iterations(output) == lines
    assert [line["version"] for line in events(output, "evaluation")] == [0, 1, 2, 3, 4]

    # Its result goes as soon as it trains on.
    on = config.model_copy(update={"evaluate": config.evaluate.model_copy(update={"stop_after": None})})

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("solrl_trainer.loop.evaluate_base", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(on, resume=True)
    assert not (output / "result.json").exists()
    assert "not finished" in write_report(output).read_text()
    last = run(on, resume=True)
    assert (last["iterations"], last["version"], last["stopped"]) == (5, 5, None)
    assert torch.allclose(exported(output), lora_of(output, 5))
    # With the setting, it takes its best also after the last iteration.
    late = config.model_copy(update={"evaluate": config.evaluate.model_copy(update={"stop_after": 0.8})})
    result = run(late, resume=True)
    assert (result["iterations"], result["version"]) == (5, 2)
    assert result["stopped"] == "no new best held-out reward in 3 iterations, since 0.5000 at version 2"
    assert torch.allclose(exported(output), lora_of(output, 2))
    # Back at its best version, it has forgotten what came after, and trains on.
    rising = (0.1, 0.2, 0.5, 0.6, 0.7, 0.8)
    with monkeypatch.context() as patch:
        patch.setattr(f"{__name__}.PLANS", {GREEN: rising, RED: rising})
        back = run(config, resume=True, version=2)
    assert (back["iterations"], back["version"], back["stopped"]) == (5, 5, None)
    curve = [line["rewards"][PLANNED] for line in events(output, "evaluation")]
    assert curve == pytest.approx(rising)


def test_a_run_whose_guard_falls_exports_the_best_version_before(service: Service, tmp_path: Path) -> None:
    output = FOLDER["of the run"] = tmp_path / "guarded"
    guarded = (f"evaluate.rewards=['{GUARD}']", f"evaluate.guards=['{GUARD}']", "evaluate.every=1")
    ended = go(service, output, *guarded, "iterations=4", "explore.lag=1")
    found = ended.result
    assert found.stopped is not None
    assert f"{GUARD}, a guard, fell clearly below the base, from 1.0000 to 0.0000 at version 2" in found.stopped
    assert (found.iterations, found.version) == (2, 1)
    assert [line["version"] for line in ended.metrics if line["event"] == "evaluation"] == [0, 1, 2]
    (first,) = (line for line in ended.metrics if line["event"] == "evaluation" and line["version"] == 1)
    assert found.after.mean("clipscore") == pytest.approx(first["rewards"]["clipscore"])
    # What it began ends in order: the newest version is pushed, and the report has explored images.
    assert [one.version for one in ended.held.versions] == [0, 1, 2]
    assert found.pairs is not None
    assert found.samples is not None
    assert found.samples.exploration.iteration == 1


@pytest.mark.slow
def test_several_ranks_end_together(tmp_path: Path) -> None:
    words = ["run", "--preset", "mini-sana/sol_rl/clipscore", "--output", str(tmp_path / "run"), "--run", "one"]
    words += sets(*LOCAL, "iterations=5", f"rewards={{'{LEVEL}': 1}}", "optimizer.shard_base=false")
    assert run_ranks(2, words, tmp_path / "log") == 0, (tmp_path / "log").read_text()
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (result["iterations"], result["version"]) == (2, 1)
    assert "no new best held-out reward in 2 iterations, since 0.5000 at version 0" in result["stopped"]


Point = tuple[float, float, float]
"""Mean, and the ends of its interval."""


def lines_of(points: dict[int, Point], guards: dict[int, Point]) -> list[dict[str, Any]]:
    """Evaluations with these points of the trained reward and of the judge by version."""
    lines = []
    for at, (mean, low, high) in points.items():
        other = guards.get(at, (0.5, 0.4, 0.6))
        line: dict[str, Any] = {"version": at, "rewards": {"clipscore": mean, "judge": other[0]}}
        if at:
            line |= {"low": {"clipscore": low, "judge": other[1]}, "high": {"clipscore": high, "judge": other[2]}}
        lines.append(line)
    return lines


BASE, RISEN = (0.2, math.nan, math.nan), (0.5, 0.4, 0.6)
WARNING = "; the base, version 0, is the best: do not use the weights"


@pytest.mark.parametrize(
    ("points", "guards", "said"),
    [
        ({0: BASE, 10: RISEN, 20: (0.45, 0.4, 0.51)}, {}, None),
        ({0: BASE, 10: RISEN, 20: (0.45, 0.4, 0.49)}, {}, "fell clearly, from 0.5000 at version 10 to 0.4500"),
        ({0: BASE, 10: (0.1, 0.05, 0.19)}, {}, f"at version 10{WARNING}"),
        ({0: BASE, 10: RISEN, 20: (0.5, 0.4, 0.6), 30: (0.5, 0.4, 0.6)}, {}, None),
        ({0: BASE, 10: RISEN, **dict.fromkeys((20, 30, 40, 50), (0.5, 0.4, 0.6))}, {}, "in 40 iterations"),
        ({0: BASE, 90: RISEN, 100: (0.45, 0.4, 0.51)}, {}, "in 10 iterations"),
        ({0: BASE, 90: RISEN, 100: (0.6, 0.5, 0.7)}, {}, None),
        ({0: BASE, 10: RISEN, 20: (0.6, 0.5, 0.7)}, {20: (0.3, 0.2, 0.49)}, "strict accuracy (judge), a guard, fell"),
        ({0: BASE, 10: RISEN, 20: (0.6, 0.5, 0.7)}, {20: (0.3, 0.2, 0.51)}, None),
        ({0: BASE, 10: RISEN}, {10: (0.3, 0.2, 0.49)}, WARNING),
    ],
)
def test_only_plateaus_or_clear_falls_end_it(
    points: dict[int, Point], guards: dict[int, Point], said: str | None
) -> None:
    chosen = ("iterations=100", "evaluate.every=10", "evaluate.stop_after=0.4", "evaluate.guards=[judge]")
    config = resolve("mini-sana/sol_rl/clipscore", overrides=chosen).config
    lines, newest = lines_of(points, guards), max(points)
    reason = reason_to_stop(lines, config, newest)
    assert reason is None if said is None else said in str(reason)
    assert str(reason).endswith(WARNING) is (WARNING in (said or ""))
    assert reason_to_stop(lines[:-1], config, newest) is None, "not evaluated yet"
    off = resolve("mini-sana/sol_rl/clipscore", overrides=["iterations=100", "evaluate.every=10"]).config
    assert reason_to_stop(lines, off, newest) is None


def test_a_reward_that_is_minimised_falls_when_it_rises() -> None:
    overrides = ("rewards={clipscore: -0.5}", "evaluate.every=10", "evaluate.stop_after=1")
    config = resolve("mini-sana/sol_rl/clipscore", overrides=overrides).config
    risen, fallen = (0.5, 0.4, 0.6), (0.1, 0.05, 0.15)
    said = reason_to_stop(lines_of({0: BASE, 10: risen}, {}), config, 10)
    assert said is not None
    assert "from -0.1000 at version 0 to -0.2500 [-0.3000, -0.2000]" in said
    assert reason_to_stop(lines_of({0: BASE, 10: fallen}, {}), config, 10) is None


def test_a_guard_that_is_not_evaluated_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"evaluate\.guards has jugde, which is not evaluated; expected one of clip"):
        resolve("mini-sana/sol_rl/clipscore", overrides=["evaluate.guards=jugde"])


def test_a_guard_that_cannot_judge_the_prompts_is_left_out_with_a_note(tmp_path: Path, notes: list[str]) -> None:
    given = {"output": tmp_path / "run", "run": "own"}
    config = resolve(
        "mini-sana/fast/clipscore", overrides=[f"prompts={prompts_in(tmp_path)}", "explore.prompts=1"], arguments=given
    ).config
    assert (config.evaluate.stop_after, config.evaluate.guards) == (0.4, ("judge",))
    checked, _ = check_run(config, resume=False)
    assert checked.evaluate.guards == ()
    assert "the run does not end when judge falls (evaluate.guards)" in notes
    assert RunConfig.model_validate_json(checked.model_dump_json()) == checked
