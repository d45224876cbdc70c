"""The trainer's command line: `solrl-train run | demo | evaluate | calibrate | presets | report | doctor`.

Imports are deferred, so that `--help` and usage errors are fast.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

# On a small machine trainer and service share the cores; threads that spin while waiting would starve the other.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@dataclass
class Run:
    """Train with a rollout service."""

    preset: str = "mini-sana/sol_rl/clipscore"
    """<model>/<recipe>/<reward>; see `solrl-train presets`."""
    rollout_url: str | None = None
    """Base URL of the rollout service, e.g. http://gpu-node:8100."""
    config: Path | None = None
    """YAML file with settings, nested or dotted."""
    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """key=value; may be given more than once."""
    output: Path | None = None
    """Folder for metrics, checkpoints, report and LoRA for diffusers; runs/<model> by default."""
    run: str | None = None
    """Name of the run at the service."""
    iterations: int | None = None
    seed: int | None = None
    resume: bool = False
    """Continue from the newest checkpoint in the output folder."""
    dry_run: bool = False
    """Print the resolved settings with the source of each, and stop."""


@dataclass
class Demo:
    """Start a rollout service for the miniature, train with it, and show the results."""

    output: Path = Path("runs/demo")
    seed: int = 42
    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """key=value; may be given more than once."""


@dataclass
class Evaluate:
    """Compare a run's averaged weights with its base on held-out prompts, by any set of rewards."""

    folder: Annotated[Path, tyro.conf.Positional]
    """Folder of the run."""
    rewards: tuple[str, ...] = ()
    """Names, or package.module:attribute; by default those of the run."""
    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """reward_options=… or device=…, to override the run's; may be given more than once."""
    prompts: int | None = None
    seeds: int | None = None
    """Images per prompt."""
    steps: int | None = None


@dataclass
class Calibrate:
    """Measure cost and fidelity of exploration plans on this machine, and write the cheapest sufficient one."""

    preset: str = "mini-sana/sol_rl/clipscore"
    """<model>/<recipe>/<reward>; see `solrl-train presets`."""
    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """key=value; may be given more than once."""
    output: Path = Path("runs/calibration")
    """Folder for calibration.json, frontier.png and plan.yaml (for `run --config`)."""
    prompts: int = 16
    """Training prompts to measure on."""
    wanted: float = 0.8
    """Required separation of the selected best and worst: 1 perfect, 0 chance."""


@dataclass
class Presets:
    """List the presets."""


@dataclass
class Report:
    """Rewrite report.html and grid.png from the files in a run's folder."""

    folder: Annotated[Path, tyro.conf.Positional]


@dataclass
class Doctor:
    """Check what this machine can run, what is missing, and what to do about it."""

    model: str = "mini-sana"
    rollout_url: str | None = None
    prompts: str = "shapes"


def main() -> None:
    """Entry point of `solrl-train`."""
    command = tyro.cli(
        Run | Demo | Evaluate | Calibrate | Presets | Report | Doctor,
        prog="solrl-train",
        description=__doc__,
        config=(tyro.conf.OmitSubcommandPrefixes,),
    )
    try:
        sys.exit(_dispatch(command))
    except KeyboardInterrupt:
        print("stopped; `--resume` continues from the last checkpoint", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if os.environ.get("SOLRL_TRACEBACK"):
            raise
        print(f"solrl-train: {error}", file=sys.stderr)
        sys.exit(2)


def _dispatch(command: Run | Demo | Evaluate | Calibrate | Presets | Report | Doctor) -> int:
    match command:
        case Run():
            return _run(command)
        case Demo():
            from solrl_trainer.demo import demo

            demo(command.output, seed=command.seed, overrides=command.set)
        case Evaluate():
            _evaluate(command)
        case Calibrate():
            _calibrate(command)
        case Presets():
            from solrl_trainer.presets import names

            print("\n".join(names()))
        case Report():
            from solrl_trainer.report.page import write_report
            from solrl_trainer.run import gallery_grid

            if (command.folder / "gallery.json").is_file():
                gallery_grid(command.folder)
            print(write_report(command.folder))
        case Doctor():
            from solrl_trainer.doctor import doctor

            return doctor(command.model, command.rollout_url, command.prompts)
    return 0


def _run(command: Run) -> int:
    import yaml

    from solrl_trainer.presets import resolve

    resolved = resolve(
        command.preset,
        overrides=command.set,
        file=yaml.safe_load(command.config.read_text()) if command.config else None,
        arguments={
            "rollout_url": command.rollout_url,
            "output": command.output,
            "run": command.run,
            "iterations": command.iterations,
            "seed": command.seed,
        },
    )
    if command.dry_run:
        values = resolved.config.model_dump(mode="json")
        for key, source in resolved.sources.items():
            section, _, name = key.partition(".")
            value = values[section][name] if name else values[section]
            print(f"{key} = {value!r}  # {source}")
        return 0

    from rich.console import Console

    from solrl_trainer.progress import result_table
    from solrl_trainer.run import run

    summary = run(resolved.config, resume=command.resume)
    console = Console()
    console.print(result_table(summary))
    console.print(f"report: {resolved.config.output / 'report.html'}")
    console.print(f"LoRA for diffusers: {resolved.config.output / 'lora.safetensors'}")
    return 0


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _calibrate(command: Calibrate) -> None:
    from solrl_trainer.calibrate import calibrate
    from solrl_trainer.presets import resolve

    if command.prompts < 1 or not 0 <= command.wanted <= 1:
        raise ValueError(
            f"got --prompts {command.prompts} --wanted {command.wanted}; expected at least 1 prompt, wanted 0 to 1"
        )
    config = resolve(command.preset, overrides=command.set).config
    summary = calibrate(config, command.output, _note, prompts=command.prompts, wanted=command.wanted)
    print(f"frontier: {command.output / 'frontier.png'}")
    if summary["chosen"] is None:
        print(f"no plan reaches a separation of {command.wanted}; lower --wanted, or choose a plan from the frontier")
    else:
        print(f"cheapest plan with a separation of at least {command.wanted}: {summary['chosen']}")
        print(f"use it: solrl-train run --preset {command.preset} --config {command.output / 'plan.yaml'}")


def _evaluate(command: Evaluate) -> None:
    counts = {"prompts": command.prompts, "seeds": command.seeds, "steps": command.steps}
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ValueError(f"got --{name} {value}; expected at least 1")

    from rich.console import Console

    from solrl_trainer.evaluate import evaluate_run
    from solrl_trainer.progress import rewards_table

    summary = evaluate_run(command.folder, _note, rewards=command.rewards, overrides=command.set, **counts)
    console = Console()
    console.print(rewards_table(summary["rewards"]))
    console.print(f"grid: {command.folder / 'evaluation' / 'grid.png'}")


if __name__ == "__main__":
    main()
