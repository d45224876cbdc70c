"""The commands of `solrl-train` with their options, and the parser of its command line."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

import tyro
from solrl_proto.home import with_home

from solrl_trainer.settings.defaults import CALIBRATED_SCHEDULES, CALIBRATED_STEPS, DEFAULT_PRESET

_URL = "http://127.0.0.1:8100"

Overrides = Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="KEY=VALUE")]
Files = Annotated[tuple[Path, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="FILE")]
Folder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]


def _value_form(value: str, default: str) -> Any:
    """The form of an option's value in the help, and its default."""
    return tyro.conf.arg(metavar=value, help_behavior_hint=f"(default: {default})")


@dataclass
class Run:
    """Train. A rollout service explores if its URL is given, otherwise this machine."""

    preset: Annotated[str | None, _value_form("NAME", DEFAULT_PRESET)] = None
    """<model>/<recipe>/<reward>; `solrl-train presets` lists them."""
    rollout_url: Annotated[str | None, _value_form("URL", "none")] = None
    """Base URL of the rollout service that explores."""
    config: Files = ()
    """YAML file with settings, nested or dotted. May be given more than once; later files win."""
    set: Overrides = ()
    """A setting, key=value with the value in YAML, such as explore.prompts=24. Wins over files.
    May be given more than once; --dry-run prints all settings, basic settings first."""
    output: Annotated[Path | None, _value_form("FOLDER", "runs/<run>")] = None
    """Folder for metrics, checkpoints, report and LoRA weights for diffusers."""
    run: Annotated[str | None, _value_form("NAME", "<model>-<recipe>-<rewards>")] = None
    """Name of the run at the service."""
    iterations: Annotated[int | None, _value_form("N", "the preset's")] = None
    """Number of iterations."""
    seed: Annotated[int | None, _value_form("N", "42")] = None
    """Seed of the run."""
    track: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME")] = ()
    """Tracker that gets figures, settings, sample images and the report: tensorboard, wandb, trackio or swanlab.
    Each needs the extra of its name. May be given more than once."""
    resume: Annotated[Path | None, _value_form("FOLDER", "a new run")] = None
    """Folder of a run to continue from its newest checkpoint, with that run's settings; other options change them.
    With --preset: continue the run with these settings in FOLDER, or start it there."""
    checkpoint: Annotated[int | None, _value_form("N", "the newest")] = None
    """With --resume: version of the checkpoint to continue from instead of the newest. Later ones are deleted."""
    allow_change: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME")] = ()
    """With --resume: a setting, or prompts, model, rewards or libraries, that may differ from the run's.
    May be given more than once. docs/settings.md lists the settings that need it."""
    dry_run: bool = False
    """Print all settings with their sources as YAML for --config, check what needs no model, and stop."""


@dataclass
class Demo:
    """Start a rollout service with a miniature model, teach it to spell, and show the result; needs solrl[ocr]."""

    output: Path = Path("runs/demo")
    """Folder of the run. One with a run is refused."""
    seed: int = 42
    """Seed of the run."""
    set: Overrides = ()
    """A setting, key=value with the value in YAML. May be given more than once."""


@dataclass
class Evaluate:
    """Compare a run's averaged weights with its base on held-out prompts, with any rewards."""

    folder: Folder
    """A run's folder."""
    rewards: Annotated[tuple[str, ...], _value_form("NAME …", "the run's")] = ()
    """Rewards, by name or package.module:attribute."""
    set: Overrides = ()
    """reward_options=… or device=…, for this evaluation only. May be given more than once."""
    prompts: Annotated[int | None, _value_form("N", "the run's")] = None
    """Number of held-out prompts."""
    seeds: Annotated[int | None, _value_form("N", "the run's")] = None
    """Images per prompt."""
    steps: Annotated[int | None, _value_form("N", "the run's")] = None
    """Solver steps per image."""
    checkpoint: Annotated[int | None, _value_form("N", "the run's result, or else the newest")] = None
    """Version of the checkpoint to evaluate."""


@dataclass
class Export:
    """Write lora.safetensors for diffusers and its model card from a checkpoint of a run, finished or not."""

    folder: Folder
    """A run's folder."""
    format: Literal["diffusers", "comfyui", "kohya"] = "diffusers"
    """Also write lora-comfyui.safetensors or lora-kohya.safetensors, with the layer names of ComfyUI or kohya."""
    merged: bool = False
    """Also write the BF16 transformer with the LoRA merged in, as the folder transformer for diffusers."""
    checkpoint: Annotated[int | None, _value_form("N", "the run's result, or else the newest")] = None
    """Version of the checkpoint to export."""
    output: Annotated[Path | None, _value_form("FOLDER", "the run's")] = None
    """Folder for lora.safetensors, README.md and grid.png."""
    push_to_hub: Annotated[str | None, _value_form("USER/NAME", "none")] = None
    """Also upload them to this model repository on Hugging Face; a new one is public. Needs HF_TOKEN."""


@dataclass
class SettingsCommand:
    """Settings of a run that a command does not start."""

    preset: str = DEFAULT_PRESET
    """<model>/<recipe>/<reward>; `solrl-train presets` lists them."""
    config: Files = ()
    """YAML file with settings, nested or dotted. May be given more than once; later files win."""
    set: Overrides = ()
    """A setting, key=value with the value in YAML. May be given more than once; wins over files."""

    @property
    def words(self) -> list[str]:
        """The words of the command line that give files and settings."""
        pairs = [("--config", str(file)) for file in self.config] + [("--set", setting) for setting in self.set]
        return [word for pair in pairs for word in pair]


@dataclass
class Calibrate(SettingsCommand):
    """Measure cost and fidelity of exploration plans on this machine; write the cheapest plan that selects well."""

    output: Path = Path("runs/calibration")
    """Folder for calibration.json and plan.yaml; use the latter with `solrl-train run --config`."""
    prompts: int = 16
    """Number of training prompts to measure on."""
    separation: float = 0.8
    """Minimum separation of the selected best and worst, with its whole interval: 1 is perfect, 0 is chance."""
    steps: tuple[int, ...] = CALIBRATED_STEPS
    """Numbers of steps to measure. explore.steps is always measured."""
    schedules: int = CALIBRATED_SCHEDULES
    """Number of solvers of few steps that are fitted and measured."""


@dataclass
class Memory(SettingsCommand):
    """Plan a run's memory on a GPU from its settings and the model's configurations; no weights are needed."""

    gpu: Annotated[float | None, _value_form("GB", "this machine's GPU, else 80")] = None
    """Memory in the GPU's name. 24, 48, 80, 141 and 192 are what CUDA reports there, other numbers 10⁹ bytes per GB."""
    gpus: int = 1
    """Number of GPUs that train the run together; each is planned."""


@dataclass
class Layout(SettingsCommand):
    """Hours of a run on some GPUs, with and without a rollout service, and the commands."""

    gpus: int = 8
    """GPUs of all runs and the service."""
    runs: int = 1
    """Equal runs that share the GPUs."""
    scaled_to: Annotated[str | None, _value_form("GPU", "none")] = None
    """Compute hours on another GPU, such as "RTX 4090", from the H200's figures and NVIDIA's peaks. Not measured."""


@dataclass
class Prompts:
    """Make a prompt set from files: .txt, .jsonl, .json, .csv, .tsv, .parquet, .arrow, or a saved data set's folder."""

    files: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """Files with training prompts, or folders with a split train. Other fields of a row become its metadata."""
    output: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    """Folder of the prompt set, for `--set prompts=FOLDER`."""
    key: Annotated[str | None, _value_form("NAME", "prompt, caption, text or input")] = None
    """Field with the text of a prompt."""
    test: Annotated[int | None, _value_form("N", "a tenth, at most 128")] = None
    """Number of held-out prompts."""
    test_file: Annotated[Path | None, _value_form("FILE", "none")] = None
    """File, or folder with a split test, of the held-out prompts; without it, some of the prompts."""


@dataclass
class Presets:
    """List the presets."""


@dataclass
class Report:
    """Recreate report.html and grid.png from a run's folder."""

    folder: Folder
    """A run's folder, finished or not."""


@dataclass
class Compare:
    """Print runs side by side: iterations, time and held-out rewards."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Folders of runs, finished or not."""


@dataclass
class RunsList:
    """List your runs at a rollout service."""

    rollout_url: str = _URL
    """Base URL of the rollout service."""


@dataclass
class RunsDelete:
    """Delete all adapter versions and curves of a run at a rollout service. The run's folder is not deleted."""

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """Name of the run."""
    rollout_url: str = _URL
    """Base URL of the rollout service."""


@dataclass
class Runs:
    """List or delete your runs at a rollout service."""

    action: Annotated[
        Annotated[RunsList, tyro.conf.subcommand("list")] | Annotated[RunsDelete, tyro.conf.subcommand("delete")],
        tyro.conf.arg(name=""),
    ]


Command = Run | Demo | Evaluate | Export | Calibrate | Memory | Layout | Prompts | Presets | Report | Compare | Runs
COMMANDS: dict[str, type[Command]] = {command.__name__.lower(): command for command in get_args(Command)}


def parse(words: list[str]) -> Command:
    """The command that the words give; exits with 2 if they are invalid. ValueError: the shell has split a setting."""
    _require_quoted(words)
    if words and (kind := COMMANDS.get(words[0])):
        # Each command has its own parser, which suggests no options of other commands.
        return cast(Command, with_home(tyro.cli(kind, prog=f"solrl-train {words[0]}", args=words[1:])))
    return tyro.cli(
        Command,
        prog="solrl-train",
        description="Reinforcement learning for text-to-image models: choose a reward, and get a LoRA that scores "
        "higher on it. `--version` prints the version.",
        args=words if not words or words[0].startswith("-") else words[:1],  # --help would hide that it is none
        config=(tyro.conf.OmitSubcommandPrefixes,),
    )


def _require_quoted(words: list[str]) -> None:
    """Refuse a setting of `--set` that a shell has split at spaces, or multiplied by its braces."""
    for place in (place for place, word in enumerate(words[:-2]) if word == "--set"):
        setting, after = words[place + 1], words[place + 2]
        name = setting.partition("=")[0]
        opened = sum(map(setting.count, "{[")) > sum(map(setting.count, "}]"))
        if (opened and not after.startswith("--")) or after.startswith(f"{name}="):
            raise ValueError(
                f"got --set {setting} and then {after}: the shell has split a setting; expected quotes around it, as "
                "in --set 'rewards={clipscore: 1, hpsv2: 0.5}'"
            )
