"""`solrl-train doctor`: checks of this machine, with a remedy for everything that is missing."""

import importlib.util
import platform
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from solrl_core.errors import MismatchError
from solrl_proto.problems import ProblemError

Row = tuple[str, str, str, str]
"""(item, "ok" | "warn" | "missing", finding, remedy)."""

_COLOURS = {"ok": "green", "warn": "yellow", "missing": "red"}


def check(model: str, rollout_url: str | None, prompts: str) -> Iterator[Row]:
    """Check everything that a training needs."""
    yield "python", "ok" if sys.version_info >= (3, 11) else "missing", platform.python_version(), "3.11 or newer"
    yield from _packages()
    yield from _device()
    yield from _tiers()
    yield _model(model)
    yield _prompts(prompts)
    if rollout_url is not None:
        yield from _service(rollout_url, model)


def _packages() -> Iterator[Row]:
    for name in ("torch", "diffusers", "transformers", "peft", "safetensors"):
        found = importlib.util.find_spec(name) is not None
        yield name, "ok" if found else "missing", "installed" if found else "not installed", f"pip install {name}"


def _device() -> Iterator[Row]:
    import torch

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            yield f"cuda:{index}", "ok", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB", "native BF16"
    else:
        found = f"CPU, {torch.get_num_threads()} threads"
        yield "device", "warn", found, "miniatures run; real models need a CUDA GPU (BF16 is emulated here)"


def _tiers() -> Iterator[Row]:
    import torch
    from solrl_core.precision import PRECISIONS, engine_version, probe

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for tier in PRECISIONS:
        numerics, how = probe(tier, device)
        yield f"tier {tier}", "ok", f"{numerics}: {how}" if numerics else how, ""
    try:
        found = engine_version() or "not installed; native nvfp4 needs it, and a Blackwell GPU"
        yield "transformer engine", "ok", found, ""
    except ValueError as error:
        action = "rebuild it for this torch and CUDA; until then nvfp4 is emulated"
        yield "transformer engine", "warn", str(error), action


def _model(model: str) -> Row:
    from solrl_core.families.load import MODELS, locate

    try:
        return f"model {model}", "ok", locate(model), ""
    except ValueError as error:
        return f"model {model}", "missing", str(error), f"registered: {', '.join(MODELS.names())}"


def _prompts(name: str) -> Row:
    from solrl_trainer.prompts import find_prompts, read_prompts

    try:
        folder = find_prompts(name)
        counts = {split: len(read_prompts(folder, split)) for split in ("train", "test")}
        return f"prompts {name}", "ok", f"{counts['train']} training, {counts['test']} held out", ""
    except ValueError as error:
        return f"prompts {name}", "missing", str(error), "give a folder with train.txt and test.txt"


def _service(url: str, model: str) -> Iterator[Row]:
    from solrl_core.noise import check_noise_contract

    from solrl_trainer.client import RolloutClient, rollout_token

    try:
        with RolloutClient(url, token=rollout_token(), patience=0) as client:
            hosted = client.models()
        names = [m.name for m in hosted.models]
        yield f"service {url}", "ok" if model in names else "warn", f"hosts {', '.join(names)}", f"needs {model}"
        check_noise_contract(hosted.noise)
        yield "noise contract", "ok", f"version {hosted.noise.version}, probe row agrees", ""
    except ProblemError as error:
        problem = error.problem
        yield f"service {url}", "missing", problem.detail, problem.action or ""
    except MismatchError as error:
        yield f"service {url}", "missing", error.detail, error.action or ""


def doctor(model: str, rollout_url: str | None, prompts: str) -> int:
    """Print the table; returns 1 if something is missing, else 0."""
    table = Table("check", "state", "found", "what to do", title="solrl-train doctor")
    rows = list(check(model, rollout_url, prompts))
    for what, state, found, action in rows:
        table.add_row(what, f"[{_COLOURS[state]}]{state}[/]", found, action if state != "ok" else "")
    Console().print(table)
    return int(any(state == "missing" for _, state, _, _ in rows))
