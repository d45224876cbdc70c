"""Fast checks of documented commands, without a GPU and without the hub."""

import importlib.util
import re
import subprocess
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import solrl_reward.__main__
import solrl_reward.cli
import solrl_rollout.__main__
import solrl_rollout.cli
import solrl_trainer.__main__
import solrl_trainer.commands.cli
import yaml
from solrl_trainer.settings.defaults import DEFAULT_PRESET
from solrl_trainer.settings.presets import resolve
from tests.docs.fences import ROOT
from tests.support.typed import typed

PROGRAMS: dict[str, Callable[[], None]] = {
    "solrl-reward": solrl_reward.__main__.main,
    "solrl-rollout": solrl_rollout.__main__.main,
    "solrl-train": solrl_trainer.__main__.main,
}
PARSERS: dict[str, Callable[[list[str]], Any]] = {
    "solrl-reward": solrl_reward.cli.parse,
    "solrl-rollout": solrl_rollout.cli.parse,
    "solrl-train": solrl_trainer.commands.cli.parse_on_all_ranks,
}


def parsed(words: list[str]) -> Any:
    """Parse words with the real command line, without running the command; SystemExit or ValueError if refused."""
    return PARSERS[words[0]](words[1:])


def ran(words: list[str]) -> int:
    """Run a command in this process; returns its exit code."""
    done = typed(PROGRAMS[words[0]], *words[1:])
    print(done.stdout, done.stderr)
    return done.returncode


def _trainer(words: list[str]) -> None:
    command = parsed(words)
    if words[1] == "run":
        # Everything except training: preset, overrides and files are resolved, on a machine without a GPU.
        assert command.dry_run or ran([*words, "--dry-run", "--set", "device=cpu"]) == 0, words
    if words[1] == "memory":  # a plan compiles for seconds; tests/trainer/test_memory.py runs the command
        assert resolve(command.preset or DEFAULT_PRESET, overrides=command.set).config, words
    if "--dry-run" in words or words[1] in ("layout", "presets"):
        assert ran(words) == 0, words


def _torchrun(words: list[str]) -> None:
    """Check torchrun's options by its own parser, and the trainer's command as without it."""
    from torch.distributed.run import get_args_parser

    options = get_args_parser().parse_args(words[1:])
    assert options.module, words
    assert options.training_script == "solrl_trainer", words
    _trainer(["solrl-train", *options.training_script_args])


def _service(words: list[str]) -> None:
    command = parsed(words)
    if words[1] in ("memory", "doctor"):
        assert ran(_with_a_miniature(words)) == 0, words
    if words[1] == "token":
        with tempfile.TemporaryDirectory() as folder:
            assert ran([str(Path(folder, word)) if word == "tokens.json" else word for word in words]) == 0, words
    assert words[1] in ("serve", "check", "memory", "doctor", "token"), command


def _reward_service(words: list[str]) -> None:
    assert parsed(words).settings.rewards, words


def _with_a_miniature(words: list[str]) -> list[str]:
    """Replace the model of a command by a miniature, which needs no hub."""
    miniatures = {"flux": "mini-flux", "sana": "mini-sana", "stable-diffusion-3": "mini-sd3"}
    near = (mini for word in words for name, mini in miniatures.items() if "/" in word and name in word.lower())
    mini = next(near, "mini-sana")
    return [mini if re.fullmatch(r"[\w.-]+/[\w.-]+", word) else word for word in words]


def _make(words: list[str]) -> None:
    subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, check=True, capture_output=True)


def _pip(words: list[str]) -> None:
    assert words[1] == "install", words
    for package in (word for word in words[2:] if not word.startswith("-")):
        name, _, extras = package.strip("]").partition("[")
        folder = name if name.startswith("./") else "."
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        assert name in (project["name"], folder), words
        assert set(filter(None, extras.split(","))) <= project["optional-dependencies"].keys(), words


def _compose(words: list[str]) -> None:
    assert words[1] == "compose", words
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    profiles = {profile for service in services.values() for profile in service.get("profiles", ())}
    wanted = {words[i + 1] for i, word in enumerate(words) if word == "--profile"}
    assert wanted <= profiles, words


def _python(words: list[str]) -> None:
    """Check that a script or module exists, and for ours also its options, without running it."""
    if words[1] != "-m":
        assert (ROOT / words[1]).is_file(), words
        return
    spec = importlib.util.find_spec(words[2])
    assert spec is not None, words
    ours = words[2].startswith(("solrl_", "minis_recipe"))
    source = "".join(path.read_text() for path in Path(spec.origin or "").parent.glob("*.py")) if ours else ""
    for word in words[3:]:
        assert not (ours and word.startswith("-")) or f'"{word}"' in source, words
        assert "/" not in word or word.startswith("runs/") or (ROOT / word).exists(), words


def _of_the_shell(words: list[str]) -> None:
    """Nothing: no program of this repository; test_own_prompts.py runs the guide's."""


CHECKS: dict[str, Callable[[list[str]], None]] = {
    ".": _of_the_shell,
    "cd": _of_the_shell,
    "cp": _of_the_shell,
    "docker": _compose,
    "git": _of_the_shell,
    "make": _make,
    "mkdir": _of_the_shell,
    "printf": _of_the_shell,
    "pip": _pip,
    "python": _python,
    "solrl-reward": _reward_service,
    "solrl-rollout": _service,
    "solrl-train": _trainer,
    "torchrun": _torchrun,
}


def check(words: list[str]) -> None:
    """Check one command; AssertionError or SystemExit if it is wrong."""
    name = Path(words[0]).name or words[0]
    assert name in CHECKS, f"say in {Path(__file__).name} how {words[0]!r} is checked"
    words = [name, *words[1:]]
    CHECKS[name](words)
