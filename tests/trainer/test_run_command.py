"""`solrl-train run`: its folder, its settings from files and folders, and its checks before loading."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from solrl_rollout.settings import RolloutSettings
from solrl_trainer.__main__ import main
from solrl_trainer.commands.cli import run_command
from solrl_trainer.commands.options import Calibrate, parse
from solrl_trainer.commands.preflight import check_run
from solrl_trainer.commands.run import run
from solrl_trainer.records.shown_log import shown_log
from solrl_trainer.report.page import write_report
from solrl_trainer.run_folder.folder import FolderInUseError, locked, saved_settings
from solrl_trainer.settings.defaults import DEFAULT_PRESET
from solrl_trainer.settings.presets import read_settings_file, resolve
from solrl_trainer.settings.token_places import warn_of_tokens
from tests.support.ports import free_port
from tests.support.small_model import small_model
from tests.support.typed import accepted, refused, typed
from tests.trainer.training_helpers import QUICK, prompts_in, sets

PRESET = "mini-sana/naive_scaling/clipscore"
"""Without a service."""
SERVED = "mini-sana/sol_rl/clipscore"
SMALL = (*QUICK, f"model={small_model()}", "evaluate.prompts=2", "evaluate.rewards=verifier")


def test_a_folder_in_use_or_with_a_run_is_refused_before_anything_else(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with locked(folder):
        before = sorted(folder.iterdir())
        # The prompts do not exist, either, but the folder is checked first.
        said = refused(main, "run", "--preset", PRESET, "--output", str(folder), *sets("prompts=nowhere"))
        assert said.startswith(f"solrl-train: {folder} is in use by another process (process {os.getpid()})")
        assert "--run or --output" in said
        assert typed(main, "calibrate", "--output", str(folder)).returncode == 2
        assert sorted(folder.iterdir()) == before
    (folder / "checkpoints").mkdir()
    for extra in ([], ["--dry-run"]):
        said = refused(main, "run", "--preset", PRESET, "--output", str(folder), *sets("prompts=nowhere"), *extra)
        assert f"solrl-train run --resume {folder}" in said
    # From Python, without a preflight.
    with pytest.raises(FileExistsError, match="already contains a run"):
        run(resolve(PRESET, overrides=[f"output={folder}"]).config)


def test_a_folder_that_cannot_be_written_is_refused_with_its_option(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder, fault in ((tmp_path / "file" / "run", "Not a directory"), (Path("/proc/run"), "No such file")):
        said = refused(main, "run", "--preset", PRESET, "--output", str(folder))
        assert re.match(f"solrl-train: got --output {folder}: .*{fault}.*; expected a folder that", said)


def test_a_folder_within_another_users_is_refused_with_its_option(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0)
    user = os.geteuid()
    os.seteuid(user or 65534)  # root may enter any folder
    try:
        with pytest.raises(
            PermissionError, match=f"^got --output {tmp_path}/run: Permission denied; expected a folder"
        ):
            locked(tmp_path / "run").__enter__()
    finally:
        os.seteuid(user)
        os.chmod(tmp_path, 0o700)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    words = ("run", "--output", str(tmp_path / "run"), "--preset")
    said = refused(main, *words, SERVED, "--rollout-url", "http://127.0.0.1:1", SOLRL_TOKEN_PATH="/nope")
    assert "got SOLRL_TOKEN_PATH=/nope: No such file or directory; expected a file" in said


def test_a_lock_ends_with_its_block_and_its_process(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(FolderInUseError), locked(tmp_path):
        pass
    child = os.fork()
    if not child:
        with locked(tmp_path):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert (tmp_path / ".lock").read_text() == f"{child}\n"
    with locked(tmp_path):
        pass


def test_a_reward_in_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rewards.py").write_text(
        "def color(images, prompts, metadata):\n    return images.mean((1, 2, 3))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    asked = ("run", "--preset", PRESET, "--dry-run", "--set")
    done = typed(main, *asked, "rewards={own_rewards:color: 1}")
    monkeypatch.delitem(sys.modules, "own_rewards", raising=False)
    assert done.returncode == 0, done.stderr
    assert "rewards: {'own_rewards:color': 1.0}  # --set" in done.stdout
    said = refused(main, *asked, "rewards={own_reward:color: 1}")
    assert "(did you mean 'own_rewards'?)" in said
    assert f"PYTHONPATH, or in the current folder {tmp_path}" in said


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("seed: [1\n", "cannot be used: line 2, column 1"),
        ("- seed\n", "contains a list"),
        ("run: a\nseed: x\n", "(from FILE:2)"),
        ("run: 2025", "(from FILE:1): got 2025; Input should be a valid string: write it in quotes"),
        ("x: " + "a" * 2**20, "has more than 1,048,576 bytes"),
        ("explore: {steps: 4}\nexplore: {keep: 6}\n", "line 2, column 1: explore is there already"),
    ],
)
def test_an_invalid_file_is_named(tmp_path: Path, text: str, fault: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    said = refused(main, "run", "--dry-run", "--config", str(file))
    assert str(file) in said
    assert fault.replace("FILE", str(file)) in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rewards={clipscore:", "1}"], "got --set rewards={clipscore: and then 1}: the shell has split a setting"),
        (["rewards=clipscore:1", "rewards=hpsv2:0.5"], "and then rewards=hpsv2:0.5: the shell has split a setting"),
        (["rewards={clipscore:1}"], "expected a space after each colon, and quotes around it all"),
    ],
)
def test_a_setting_without_quotes_is_refused_with_the_cure(words: list[str], said: str) -> None:
    assert said in refused(main, "run", "--dry-run", "--set", *words)


def test_a_path_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    prompts_in(tmp_path / "mine")
    (tmp_path / "a.yaml").write_text(
        "output: ~/runs/x\nprompts: {~/mine: 1}\nstart_lora: ~\nreward_options: {clipscore: {model: ~/clip}}\n"
    )
    config = resolve(PRESET, files={"a": read_settings_file(tmp_path / "a.yaml")}).config
    assert (config.output, config.start_lora) == (tmp_path / "runs/x", None)
    assert list(config.prompt_sources) == [str(tmp_path / "mine")]
    assert config.reward_options == {"clipscore": {"model": str(tmp_path / "clip")}}
    command = parse(["calibrate", "--output=~/c", "--config=~/a.yaml"])
    assert isinstance(command, Calibrate)
    assert (command.output, command.config) == (tmp_path / "c", (tmp_path / "a.yaml",))
    model = "~/flux.safetensors+~/FLUX"
    assert resolve(PRESET, overrides=[f"model={model}"]).config.model == model.replace("~", str(tmp_path))
    served = RolloutSettings(model=("a=~/m",), token_file=Path("~/tokens"))
    assert (served.models[0].location, served.token_file) == (str(tmp_path / "m"), tmp_path / "tokens")


def test_a_folder_has_its_name_in_a_locale_of_ascii(tmp_path: Path) -> None:
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    prompts_in(tmp_path / "é")
    words = [*sets("prompts=é", "explore.prompts=2", "evaluate.rewards=[]"), "--output", "é/run"]
    done = subprocess.run(
        [sys.executable, "-m", "solrl_trainer", "run", "--preset", PRESET, "--dry-run", *words],
        env=os.environ | locale,
        cwd=tmp_path,
        capture_output=True,
        timeout=600,
    )
    assert not done.returncode, done.stderr
    assert "\noutput: é/run  # command line\n" in done.stdout.decode()


def test_a_folder_is_not_shown_as_the_registered_set_of_its_name() -> None:
    names = ("shapes", "./shapes", "/a/shapes")
    shown = {name: resolve(PRESET, overrides=[f"prompts={name}"]).config.shown_prompts for name in names}
    assert shown == {"shapes": "shapes", "./shapes": "./shapes", "/a/shapes": "./shapes"}


def test_the_command_after_a_calibration_keeps_its_arguments(tmp_path: Path) -> None:
    given = Calibrate(
        preset="mini-sd3/sol_rl/clipscore",
        config=(Path("mine.yaml"),),
        set=("solver=dpm2", 'rewards={clipscore: 1, "m:r": 2}', "explore.steps=6", "explore.keep=8"),
        output=tmp_path,
    )
    words = run_command(given, {"steps": 4, "precision": "bf16"})
    assert words == [
        *("solrl-train", "run", "--preset", "mini-sd3/sol_rl/clipscore"),
        *("--config", "mine.yaml", "--config", str(tmp_path / "plan.yaml")),
        *sets("solver=dpm2", 'rewards={clipscore: 1, "m:r": 2}', "explore.keep=8"),
    ]


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--schedules", "5"], "got --schedules 5; expected 0 to 4"),
        (["--steps", "4", "0"], "got --steps 4 0; expected 1 to 200 steps each"),
        (["--steps", "201"], "got --steps 201; expected 1 to 200 steps each"),
    ],
)
def test_a_calibration_refuses_limits_that_no_plan_meets(tmp_path: Path, words: list[str], fault: str) -> None:
    assert fault in refused(main, "calibrate", *words, "--output", str(tmp_path))


@pytest.mark.parametrize("text", ["rewards=clipscore", "rewards=[clipscore]", "rewards={clipscore: 1}"])
def test_a_reward_may_be_given_without_a_weight(text: str) -> None:
    assert resolve("mini-sana/sol_rl/hpsv2", overrides=[text]).config.rewards == {"clipscore": 1.0}


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        (["rewards=clipscor"], "got reward 'clipscor' (did you mean 'clipscore'?)"),
        (["rewards=no_such_module:reward"], "there is no module 'no_such_module'"),
        (["evaluate.rewards=[beauty]"], "got reward 'beauty'"),
        (["prompts=nowhere"], "'nowhere'"),
        (["model=mini-sanna"], "got model 'mini-sanna' (did you mean 'mini-sana'?)"),
        (["explore.prompts=100000"], "--set explore.prompts="),
        (["reward_options={hpsv2: {}}"], "got options for reward 'hpsv2'"),
    ],
)
@pytest.mark.parametrize("extra", [[], ["--dry-run"]])
def test_invalid_settings_are_reported_before_loading(
    tmp_path: Path, settings: list[str], fault: str, extra: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("solrl_trainer.commands.run.train", lambda *_, **__: pytest.fail("a training began"))
    folder = tmp_path / "run"
    assert fault in refused(main, "run", "--preset", PRESET, "--output", str(folder), *sets(*settings), *extra)
    assert not (folder / "config.json").exists()


def test_a_dry_run_says_that_the_service_was_not_checked(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    done = accepted(main, "run", "--dry-run", "--rollout-url", url, "--output", str(tmp_path / "run"))
    assert done.stderr == f"not checked: the service at {url} does not answer\n"
    assert not (tmp_path / "run").exists()


def test_a_token_that_goes_where_a_file_says_is_named(tmp_path: Path) -> None:
    url, reward = f"http://127.0.0.2:{free_port()}", "reward_options={clipscore: {at: http://theirs.invalid}}"
    (tmp_path / "theirs.yaml").write_text(f"rollout_url: {url}\nreward_options: {{clipscore: {{at: {url}}}}}\n")
    theirs = ("run", "--dry-run", "--preset", SERVED, "--config", str(tmp_path / "theirs.yaml"))
    tokens = {"SOLRL_TOKEN": "secret", "SOLRL_REWARD_TOKEN": "secret"}
    assert "token" not in typed(main, *theirs, **tokens).stderr, "loopback stays here"
    config = resolve(SERVED, files={"theirs.yaml": {"rollout_url": "https://theirs.invalid"}}, overrides=[reward])
    with shown_log((said := list[str]()).append), pytest.MonkeyPatch.context() as patch:
        warn_of_tokens(config)
        assert said == []
        patch.setenv("SOLRL_TOKEN_PATH", str(tmp_path / "token"))
        patch.setenv("SOLRL_REWARD_TOKEN", "secret")
        warn_of_tokens(config)
    (line,) = said
    assert line.startswith("the token in SOLRL_TOKEN goes to https://theirs.invalid, by rollout_url in theirs.yaml")


def test_rewards_without_their_metadata_are_refused_or_omitted_with_a_note(tmp_path: Path, notes: list[str]) -> None:
    overrides = [f"prompts={prompts_in(tmp_path)}", "explore.prompts=1"]
    trained = sets(*overrides, "rewards={clipscore: 1, verifier: 0}")
    said = refused(main, "run", "--preset", PRESET, "--dry-run", *trained)
    assert "reward 'verifier' cannot be used with the train prompts" in said
    assert "train_metadata.jsonl" in said
    notes.clear()
    config = resolve(PRESET, overrides=overrides).config
    assert config.evaluate.rewards == ("verifier", "verifier_graded", "judge")
    checked, _ = check_run(config, resume=False)
    assert checked == config.model_copy(update={"evaluate": config.evaluate.model_copy(update={"rewards": ()})})
    assert notes[0].startswith("held-out images are not scored with verifier: of prompt 'a green cross', metadata.")
    assert len(notes) == 3
    # Metadata of another set of prompts do not fit, either.
    (tmp_path / "test.txt").unlink()
    line = {"prompt": "a photo of a bench", "tag": "single_object", "include": [{"class": "bench", "count": 1}]}
    (tmp_path / "test_metadata.jsonl").write_text(json.dumps(line) + "\n")
    assert check_run(resolve(PRESET, overrides=overrides).config, resume=False)[0].evaluate.rewards == ()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs: one with two iterations, one with one iteration."""
    folder = tmp_path_factory.mktemp("runs")
    for name, iterations in (("whole", "2"), ("half", "1")):
        accepted(
            main,
            *("run", "--preset", PRESET, "--run", "one", "--output", str(folder / name), "--iterations", iterations),
            *sets(*SMALL),
        )
    return folder


@pytest.fixture
def half(runs: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "half"
    shutil.copytree(runs / "half", folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("name", "checkpoint"), [("half", None), ("whole", 1)])
def test_a_finished_run_that_goes_on_and_stops_early_has_no_result(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, checkpoint: int | None
) -> None:
    folder = shutil.copytree(runs / name, tmp_path / name)
    for file in ("evaluation.json", "grid.png"):
        (folder / "evaluation").mkdir(exist_ok=True)
        (folder / "evaluation" / file).write_text('{"version": 1}')
    config = saved_settings(folder).model_copy(update={"iterations": 2})

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("solrl_trainer.loop.evaluate_average", stop)
        with pytest.raises(KeyboardInterrupt):
            run(config, resume=True, version=checkpoint)
    # Figures of a version that was not trained again still hold.
    assert (folder / "result.json").exists() == (folder / "grid.png").exists() == (checkpoint is None)
    assert (folder / "evaluation" / "grid.png").exists()
    assert not (folder / "report.html").exists()
    page = write_report(folder).read_text(encoding="utf-8")
    for text, shown in (("not finished", True), ("2 of 2 iterations", True), ("Before and after", False)):
        assert (text in page) == shown


def test_a_folder_with_links_is_refused_and_what_they_lead_to_stays(half: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("precious")
    words = (("run", "--resume", str(half)), ("export", str(half)), ("evaluate", str(half)), ("report", str(half)))
    for name in ("result.json", "lora.safetensors", "grid.png", "checkpoints/000007"):
        (file := half / name).unlink(missing_ok=True)
        file.symlink_to(mine)
        for command in words:
            assert f"{file} is a link; expected only files and folders" in refused(main, *command)
        file.unlink()
    os.mkfifo(half / "trainer.log.1")
    dry = (["--resume", str(half)], ["--resume", str(half), "--preset", PRESET], ["--output", str(half)])
    for options in (["--resume", str(half)], *([*options, "--dry-run"] for options in dry)):
        assert "is a pipe, socket or device" in refused(main, "run", *options)
    assert mine.read_text() == "precious"


def test_a_finished_runs_settings_start_another_and_may_change(half: Path, tmp_path: Path) -> None:
    asked = ("run", "--config", str(half / "settings.yaml"), "--run", "two", "--output", str(tmp_path / "two"))
    given = yaml.safe_load(accepted(main, *asked, "--dry-run").stdout)
    again = resolve(DEFAULT_PRESET, files={"a.yaml": given}).config
    assert again == saved_settings(half).model_copy(update={"run": "two", "output": tmp_path / "two"})
    # Changed settings of the evaluation evaluate the base again; a dry run names the sources of its settings.
    words = ("run", "--resume", str(half), *sets("evaluate.seeds=2", "evaluate.rewards=[verifier_graded, verifier]"))
    lines = accepted(main, *words, "--dry-run").stdout.splitlines()
    assert f"lora.rank: 2  # {half / 'config.json'}" in lines
    assert "evaluate.seeds: 2  # --set" in lines
    assert "evaluating held-out prompts (version 0)" in accepted(main, *words).stderr
    assert "evaluating held-out prompts (version 0)" not in accepted(main, *words).stderr
    assert list(json.loads((half / "result.json").read_text())["rewards"]) == [
        "clipscore",
        "verifier_graded",
        "verifier",
    ]
    base = half / "base_evaluation.safetensors"
    base.write_bytes(base.read_bytes()[:100])
    assert "evaluating held-out prompts (version 0)" in accepted(main, *words).stderr


def test_settings_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "missing.yaml", "No such file"), (tmp_path, "Is a directory")):
        for command in ("run", "memory", "calibrate"):
            said = refused(main, command, "--config", str(path))
            assert said.startswith(f"solrl-train: {path} cannot be read: {why}")
            assert said.endswith("expected a YAML file with settings\n")
    for text, fault in (("{", "cannot be read as settings"), ('{"seed": "x"}', f"(from {tmp_path / 'config.json'})")):
        (tmp_path / "config.json").write_text(text)
        assert fault in refused(main, "run", "--resume", str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--resume", "nowhere"], "nowhere contains no run (no config.json)"),
        (["--checkpoint", "1"], "expected --resume FOLDER"),
        (["--resume", "HALF", "--output", "elsewhere"], "in its own folder"),
        (["--allow-change", "seed"], "got --allow-change without --resume"),
        (["--resume", "HALF", "--allow-change", "prompt"], "got --allow-change prompt (did you mean 'prompts'?)"),
        (["--resume", "HALF", "--run", "another"], "run: one → another. run cannot change: start a new run"),
    ],
)
def test_a_run_that_cannot_be_resumed_is_an_error(half: Path, arguments: list[str], fault: str) -> None:
    settings = (half / "config.json").read_text()
    assert fault in refused(main, "run", *(str(half) if word == "HALF" else word for word in arguments))
    assert (half / "config.json").read_text() == settings
