"""The trainer's command line, `solrl-train`. Imports are deferred, so that `--help` and errors appear immediately."""

import os
import shlex
import signal
import sys
from collections.abc import Collection, Mapping
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any

from solrl_core.interrupts import interrupt_message, unwinding

from solrl_trainer.commands.options import (
    Calibrate,
    Command,
    Compare,
    Demo,
    Evaluate,
    Export,
    Layout,
    Memory,
    Presets,
    Prompts,
    Report,
    Run,
    Runs,
    RunsDelete,
    SettingsCommand,
    parse,
)
from solrl_trainer.ranks.rank_info import RankInfo, read_rank_info
from solrl_trainer.settings.defaults import CALIBRATED_SCHEDULES, DEFAULT_PRESET

if TYPE_CHECKING:
    from solrl_proto.models import ModelInfo

    from solrl_trainer.settings.config import RunConfig
    from solrl_trainer.settings.presets import Resolved


def parse_on_all_ranks(words: list[str]) -> Command:
    """The command of `words`. If they are invalid, rank 0 prints the error and exits with 2, all other ranks with 0."""
    rank_info = read_rank_info()
    with ExitStack() as stack:
        if not rank_info.is_rank_zero:
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        try:
            return parse(words)
        except (SystemExit, ValueError):
            if rank_info.is_rank_zero:
                raise
            sys.exit(0)


def dispatch(command: Command) -> int:
    """Run a command; returns its exit code."""
    rank_info = read_rank_info()
    alone = not isinstance(command, Run | Evaluate | Calibrate) or (isinstance(command, Run) and command.dry_run)
    if alone and not rank_info.is_rank_zero:
        return 0
    match command:
        case Run(dry_run=True):
            _dry_run(command)
        case Run():
            _run(command, rank_info)
        case Demo():
            from solrl_trainer.commands.demo import demo

            with unwinding(signal.SIGINT, signal.SIGTERM):
                demo(command.output, seed=command.seed, overrides=command.set)
        case Evaluate():
            _evaluate(command, rank_info)
        case Export():
            _export(command)
        case Calibrate():
            _calibrate(command, rank_info)
        case Memory():
            config = _settings(command).config
            from solrl_trainer.commands.memory import plan

            plan(config, gpu=command.gpu, gpus=command.gpus)
        case Layout():
            from solrl_trainer.commands.layout import layout

            layout(_settings(command).config, command)
        case Prompts():
            from solrl_trainer.commands.import_prompts import import_prompts

            notes = import_prompts(
                command.files, command.output, key=command.key, test=command.test, test_file=command.test_file
            )
            print("\n".join(notes))
        case Presets():
            from solrl_trainer.settings.presets import print_presets

            print_presets()
        case Report():
            from solrl_trainer.commands.run import gallery_grid
            from solrl_trainer.report.page import write_report

            if (command.folder / "gallery.json").is_file():
                gallery_grid(command.folder)
            print(write_report(command.folder))
        case Compare():
            from solrl_trainer.commands.compare import compare

            compare(command.folders)
        case Runs():
            from solrl_trainer.commands.runs import delete_run, list_runs

            if isinstance(command.action, RunsDelete):
                delete_run(command.action.rollout_url, command.action.name)
            else:
                list_runs(command.action.rollout_url)
    return 0


def _run(command: Run, rank_info: RankInfo) -> None:
    from solrl_trainer.ranks.rank_runtime import process_group

    resume, version, allowed = command.resume is not None, command.checkpoint, command.allow_change
    with ExitStack() as locks, process_group(rank_info) as processes:
        if not processes.is_rank_zero:
            from solrl_trainer.commands.run import follow

            follow(processes, resume=resume, version=version)
            return
        resolved = _resolve(command)
        from solrl_trainer.run_folder.folder import locked

        locks.enter_context(locked(resolved.config.output))
        config, hosted = _check_run(command, resolved)

        from solrl_core.errors import RewardUnavailableError
        from solrl_proto.printable import printable
        from solrl_proto.problems import ProblemError

        from solrl_trainer.commands.run import resume_hint, run
        from solrl_trainer.records.progress import show_result

        hint = resume_hint(config, processes)
        processes.set_hint(hint)
        with interrupt_message(printable(f"solrl-train: stopped; {hint}")):
            try:
                summary = run(
                    config, resume=resume, version=version, allowed=allowed, processes=processes, hosted=hosted
                )
            except (ProblemError, RewardUnavailableError) as error:
                error.add_note(hint)
                raise
        show_result(summary, config.output)


def _check_run(command: Run, resolved: "Resolved", *, dry: bool = False) -> tuple["RunConfig", "ModelInfo | None"]:
    """`check_run`, whose warnings are printed."""
    from solrl_trainer.commands.preflight import check_run
    from solrl_trainer.records.shown_log import shown_log
    from solrl_trainer.settings.token_places import warn_of_tokens

    with shown_log(lambda text: print(text, file=sys.stderr, flush=True)):
        warn_of_tokens(resolved)
        return check_run(resolved.config, resume=command.resume is not None, dry=dry)


def _resolve(command: Run) -> "Resolved":
    from solrl_trainer.run_folder.folder import saved_settings
    from solrl_trainer.settings.presets import read_settings_file, resolve, resolve_again

    if command.resume is None:
        options = {"--checkpoint": command.checkpoint is not None, "--allow-change": bool(command.allow_change)}
        for option, is_set in options.items():
            if is_set:
                raise ValueError(f"got {option} without --resume; expected --resume FOLDER with it")
    if command.resume is not None and command.output not in (None, command.resume):
        raise ValueError(
            f"got --resume {command.resume} --output {command.output}; a run is continued in its own folder"
        )
    files = {str(path): read_settings_file(path) for path in command.config}
    arguments = {
        "rollout_url": command.rollout_url,
        "output": command.resume or command.output,
        "run": command.run,
        "iterations": command.iterations,
        "seed": command.seed,
        "track": command.track or None,
    }
    if command.resume is not None and command.preset is None:
        saved = saved_settings(command.resume)
        return resolve_again(saved, overrides=command.set, files=files, arguments=arguments)
    return resolve(command.preset or DEFAULT_PRESET, overrides=command.set, files=files, arguments=arguments)


def _dry_run(command: Run) -> None:
    from solrl_trainer.run_folder.folder import check_entries
    from solrl_trainer.settings.settings_yaml import sourced_yaml

    resolved = _resolve(command)
    print("\n".join(sourced_yaml(resolved)))
    check_entries(resolved.config.output)
    _check_run(command, resolved, dry=True)
    if command.resume is not None:
        from solrl_trainer.run_folder.resuming import check_before_loading

        check_before_loading(resolved.config, command.checkpoint, command.allow_change)


def _export(command: Export) -> None:
    from solrl_trainer.commands.export import check_push, export, push
    from solrl_trainer.run_folder.folder import saved_settings

    config, repository = saved_settings(command.folder), command.push_to_hub
    if repository is not None:
        check_push(repository)
    files = export(config, command.checkpoint, command.output, repository, layout=command.format, merged=command.merged)
    print(f"LoRA for diffusers: {files[0]}")
    print(f"model card: {files[1]}")
    for file in files[2:]:
        if file.suffix == files[0].suffix:
            print(f"LoRA with the layer names of {command.format}: {file}")
    if command.merged:
        print(f"transformer with the LoRA merged in: {files[0].parent / 'transformer'}")
    if repository is not None:
        print(f"pushed: {push(files, repository, f'LoRA of {config.run}')}")


def _calibrate(command: Calibrate, rank_info: RankInfo) -> None:
    from solrl_trainer.ranks.rank_runtime import process_group
    from solrl_trainer.run_folder.folder import locked

    with ExitStack() as locks, process_group(rank_info) as processes:
        _check(command)
        settings = _settings(command)
        if processes.is_rank_zero:
            locks.enter_context(locked(command.output))
        from solrl_core.sampling.fitting import SCHEDULES

        from solrl_trainer.calibration.plans import PlanSet
        from solrl_trainer.commands.calibrate import calibrate
        from solrl_trainer.records.shown_log import shown_log
        from solrl_trainer.records.time_left import Countdown
        from solrl_trainer.settings.token_places import warn_of_reward_tokens

        with Countdown("calibrating", quiet=not processes.is_rank_zero) as countdown, shown_log(countdown.print):
            warn_of_reward_tokens(settings.config.reward_options, settings.sources["reward_options"])
            summary = calibrate(
                settings.config,
                command.output,
                prompts=command.prompts,
                minimum=command.separation,
                limits=PlanSet(command.steps, SCHEDULES[: command.schedules]),
                processes=processes,
                progress=countdown,
            )
    if rank_info.is_rank_zero:
        _print_calibration(command, summary)


def _check(command: Calibrate) -> None:
    from solrl_proto.rollouts import MAX_STEPS

    if command.prompts < 1 or not 0 <= command.separation <= 1:
        raise ValueError(
            f"got --prompts {command.prompts} --separation {command.separation}; expected at least 1 prompt, and a "
            "separation of 0 to 1"
        )
    if not 0 <= command.schedules <= CALIBRATED_SCHEDULES:
        raise ValueError(f"got --schedules {command.schedules}; expected 0 to {CALIBRATED_SCHEDULES}")
    if not all(1 <= steps <= MAX_STEPS for steps in command.steps):
        raise ValueError(f"got --steps {' '.join(map(str, command.steps))}; expected 1 to {MAX_STEPS} steps each")


def _print_calibration(command: Calibrate, summary: Mapping[str, Any]) -> None:
    from solrl_trainer.commands.calibrate import frontier
    from solrl_trainer.settings.presets import read_settings_file

    print("frontier, plans that no other is both cheaper and better than:")
    for row in frontier(summary["plans"]):
        print(f"- {row['name']}: {row['seconds']:.2f} s per group, separation {row['separation']:.3f}")
    required = f"a separation of at least {command.separation:g}"
    if summary["chosen"] is None:
        print(f"no plan has {required}; ask for less (--separation), or choose a plan from the frontier")
    else:
        print(f"cheapest plan with {required}: {summary['chosen']}")
    for line in summary["verdict"]:
        print(f"- {line}")
    if summary["chosen"] is not None:
        planned = read_settings_file(command.output / "plan.yaml")["explore"]
        print(f"use it: {shlex.join(run_command(command, planned))}")


def _settings(command: SettingsCommand) -> "Resolved":
    from solrl_trainer.settings.presets import read_settings_file, resolve

    files = {str(path): read_settings_file(path) for path in command.config}
    return resolve(command.preset, overrides=command.set, files=files)


def run_command(command: Calibrate, planned: Collection[str]) -> list[str]:
    """The command of a run with a calibrated plan, and with the calibration's settings that are not `planned`."""
    words = ["solrl-train", "run", "--preset", command.preset]
    for path in (*command.config, command.output / "plan.yaml"):
        words += ["--config", str(path)]
    for override in command.set:
        section, _, name = override.partition("=")[0].strip().partition(".")
        if section != "explore" or name not in planned:
            words += ["--set", override]
    return words


def _evaluate(command: Evaluate, rank_info: RankInfo) -> None:
    from rich.console import Console

    from solrl_trainer.ranks.rank_runtime import process_group

    with process_group(rank_info) as processes:
        from solrl_trainer.commands.evaluate import evaluate_run
        from solrl_trainer.records.progress import evaluation_table
        from solrl_trainer.records.shown_log import shown_log
        from solrl_trainer.records.time_left import Countdown

        with Countdown("evaluating", quiet=not processes.is_rank_zero) as countdown, shown_log(countdown.print):
            summary = evaluate_run(
                command.folder,
                progress=countdown,
                rewards=command.rewards,
                overrides=command.set,
                prompts=command.prompts,
                seeds=command.seeds,
                steps=command.steps,
                checkpoint=command.checkpoint,
                processes=processes,
            )
    if rank_info.is_rank_zero:
        console = Console(markup=False)
        console.print(evaluation_table(summary))
        console.print(f"grid: {command.folder / 'evaluation' / 'grid.png'}", soft_wrap=True)
