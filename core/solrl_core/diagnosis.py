"""Findings about a machine that `doctor` of both services shares, with a remedy for everything that is missing."""

import os
import platform
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from solrl_proto.printable import printable

from solrl_core.devices import require_device

if TYPE_CHECKING:
    from solrl_core.rewards.loading import RewardFile

State = Literal["ok", "n/a", "warn", "missing"]
"""n/a: not available on this machine, and not needed. missing: the requested work will fail."""

_STYLES = {"ok": "green", "n/a": "dim", "warn": "yellow", "missing": "red"}
_UNLIMITED = 100_000
"""Columns of a file or a pipe."""
_PACKAGES = ("torch", "diffusers", "transformers", "peft", "safetensors", "huggingface_hub")
_HUB_SECONDS = 10.0
_INDEX = "model_index.json"
_CACHED = "in the hub's cache on this machine"
_NOT_CACHED = "it is not in the hub's cache on this machine"


class Finding(NamedTuple):
    """A row of the table: subject, state, finding, and remedy."""

    subject: str
    state: State
    text: str
    action: str = ""


def show(title: str, findings: Iterable[Finding]) -> int:
    """Print a table of findings, as wide as the terminal; in a file or a pipe every finding is one line.

    The findings are computed while they are read; a missing package ends them. Returns the exit code: 1 if something is
    missing, otherwise 0.
    """
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    rows = [Finding(*map(printable, row)) for row in _as_far_as_installed(findings)]  # type: ignore[arg-type]
    fixed = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(markup=False, width=None if fixed else _UNLIMITED)
    table = Table.grid(*(Column(overflow="fold") for _ in range(3)), padding=(0, 2))
    for row in rows:
        remedy = ("\n→ " if fixed else " → ") + row.action if row.action else ""
        table.add_row(Text(row.subject), Text(row.state, _STYLES[row.state], no_wrap=True), Text(row.text + remedy))
    print(f"{title}\n")
    console.print(table)
    return int(any(row.state == "missing" for row in rows))


def _as_far_as_installed(findings: Iterable[Finding]) -> Iterator[Finding]:
    try:
        yield from findings
    except ImportError as error:
        action = "install solrl again, with its dependencies"
        yield Finding(error.name or "a package", "missing", f"not installed: {error}", action)


def machine(
    device: str = "auto", precision: str | None = "auto", packages: Sequence[str] = _PACKAGES
) -> Iterator[Finding]:
    """Findings about software, devices and precisions.

    Args:
        device: the program's device: auto, cpu, cuda, cuda:1, …
        precision: the program's precision, or auto; None for a program that generates nothing.
        packages: distributions that the program needs.
    """
    yield Finding("python", "ok", platform.python_version())
    yield Finding("packages", "ok", ", ".join(f"{name} {version(name)}" for name in packages))
    yield from _devices(device)
    if precision is not None:
        yield from _precisions(device, precision)


def _devices(device: str) -> Iterator[Finding]:
    import torch

    count = torch.cuda.device_count()
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        summary = f"{properties.name}, {memory}, compute capability {properties.major}.{properties.minor}"
        yield Finding(f"cuda:{index}", "ok", summary)
    try:
        require_device(device)
    except ValueError as error:
        yield Finding("device", "missing", *str(error).split("; expected ", 1))
        return
    if not count:
        summary = f"no CUDA device; runs on the CPU, with {torch.get_num_threads()} threads"
        yield Finding("device", "warn", summary, "miniatures run; other models need a CUDA GPU")


def _precisions(device: str, precision: str) -> Iterator[Finding]:
    import torch

    from solrl_core.precision.support import PRECISIONS, fastest_precision, probe, supported_precisions
    from solrl_core.precision.te import engine_version

    torch_device = torch.device("cuda" if torch.cuda.is_available() and device != "cpu" else "cpu")
    for name in PRECISIONS:
        numerics, how = probe(name, torch_device)
        yield Finding(f"precision {name}", "ok" if numerics else "n/a", f"{numerics}: {how}" if numerics else how)
    try:
        engine = engine_version()
    except ValueError as error:
        action = "rebuild it for this torch and CUDA; until then nvfp4 is emulated"
        yield Finding("transformer engine", "warn", str(error), action)
    else:
        summary = engine or "not installed; native nvfp4 needs it, and a Blackwell GPU"
        yield Finding("transformer engine", "ok" if engine else "n/a", summary)
    if precision == "auto":
        yield Finding("precision auto", "ok", fastest_precision(torch_device))
    elif precision not in supported_precisions(torch_device):
        action = f"use one of {', '.join(supported_precisions(torch_device))}"
        yield Finding("precision", "missing", f"this device does not support {precision}", action)
    elif torch_device.type == "cuda" and probe(precision, torch_device).numerics == "emulated":
        action = "use fp8 or auto; `solrl-rollout serve --emulate` serves it all the same"
        yield Finding("precision", "warn", f"{precision} is emulated on this GPU, slower than bf16", action)
    else:
        yield Finding("precision", "ok", precision)


def model(name: str, *, revision: str | None = None) -> Finding:
    """Findings about a model: complete on this machine, or available from the hub.

    Args:
        name: registered name, local folder in diffusers format, hub id, or FILE.safetensors+ one of these.
        revision: hub commit or tag.
    """
    from solrl_core.families.load import describe_model, locate, split_model
    from solrl_core.families.single_file import parts_in

    try:
        where, file, described = locate(name), split_model(name)[0], describe_model(name, revision)
        in_file = parts_in(file, described.family.file_encoders if described else ()) if file else ()
    except (ValueError, OSError) as error:
        return Finding("model", "missing", str(error))
    if Path(where).is_dir():
        fault = _fault_of_folder(Path(where), in_file)
        if fault:
            return Finding("model", "missing", f"{name} in {where}: {fault}", "give a complete diffusers folder")
        return Finding("model", "ok", f"{name} in {where}")
    fault, downloadable = _fault_in_cache(where, _INDEX, lambda folder: _fault_of_folder(folder, in_file), revision)
    if downloadable:
        return Finding("model", *_to_download(where, _INDEX, fault, revision))
    if fault:
        return Finding("model", "missing", f"{where}: {fault}", "expected a hub id such as owner/name")
    return Finding("model", "ok", f"{where}, {_CACHED}")


def _fault_in_cache(
    where: str, file: str, fault_in: Callable[[Path], str], revision: str | None = None
) -> tuple[str, bool]:
    """The fault of what the hub's cache has, empty if that is whole; and whether the hub may have it."""
    from huggingface_hub import errors, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(where, file, revision=revision)
    except errors.HFValidationError:
        return "neither a folder nor a hub id", False
    fault = fault_in(Path(cached).parent) if isinstance(cached, str) else _NOT_CACHED
    return f"{_CACHED}, {fault}" if fault and isinstance(cached, str) else fault, bool(fault)


def _to_download(
    where: str, file: str, fault: str, revision: str | None = None, command: str = ""
) -> tuple[State, str, str]:
    """State, finding and remedy of something that is not on this machine but may be on the hub."""
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url

    from solrl_core.families.load import advice

    summary = f"{where}: {fault}"
    try:
        get_hf_file_metadata(hf_hub_url(where, file, revision=revision), timeout=_HUB_SECONDS)
    except errors.EntryNotFoundError:
        kind = "model in diffusers format" if file == _INDEX else "repository that has it"
        return "missing", summary, f"the hub has no {file} there: use the id of a {kind}"
    except errors.HfHubHTTPError as error:
        return "missing", summary, advice(error, where)
    except Exception as error:  # of the HTTP library, which depends on the version of huggingface_hub
        return "missing", summary, advice(errors.LocalEntryNotFoundError(str(error)), where)
    return "warn", summary, f"the start downloads it; `{command or f'hf download {where}'}` does so now"


def _fault_of_folder(folder: Path, in_file: Collection[str]) -> str:
    """Why a folder is no complete model in diffusers format, the parts `in_file` aside; empty if it is complete."""
    from solrl_core.families.load import family_of
    from solrl_core.families.part_files import missing_files, read_index

    try:
        family_of(read_index(folder).get("_class_name"), _INDEX)
        lacking = missing_files(folder, in_file)
    except (OSError, ValueError) as error:
        return str(error)
    return f"it lacks {', '.join(lacking)}" if lacking else ""


def rewards(
    names: Sequence[str],
    model: str | None,
    *,
    revision: str | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    ask: Callable[[str], Iterable[Finding]] | None = None,
    sources: Mapping[str, str] | None = None,
) -> Iterator[Finding]:
    """Findings about rewards: whether they can be imported, and whether their weights are on this machine or the hub.

    Args:
        names: rewards, by registered name or `package.module:attribute`.
        model: model whose `solrl.json` has options of rewards: registered name, folder or hub id; None for none.
        revision: the model's hub commit or tag.
        options: override the model's options.
        ask: returns the findings about a reward that a server computes; without it, no server is asked.
        sources: reward → registered name or `package.module:attribute`, where that is not the name itself.
    """
    from solrl_core.families.load import describe_model
    from solrl_core.model_options import ModelOptions
    from solrl_core.reward_registry import REWARDS
    from solrl_core.rewards.reward import AT, check_named, check_reward

    try:
        check_named(options or {}, names)
    except ValueError as error:
        yield Finding("options of rewards", "missing", str(error), "correct them, or load that reward, too")
    described = None
    with suppress(ValueError, OSError):  # a finding about the model has the reason
        described = describe_model(model, revision) if model else None
    defaults = described.options if described else ModelOptions()
    for name in names:
        source = (sources or {}).get(name, name)
        if at := (options or {}).get(name, {}).get(AT):
            not_asked = Finding(f"reward {name}", "n/a", f"computed by the server at {at}, which was not asked")
            yield from ask(name) if ask else [not_asked]
            continue
        all_options = {**defaults.rewards.get(source, {}), **(options or {}).get(name, {})}
        try:
            check_reward(source, all_options)
        except ValueError as error:
            yield Finding(f"reward {name}", "missing", str(error))
            continue
        yield Finding(f"reward {name}", *_of_reward(REWARDS.find(source), all_options))


def _of_reward(reward: Any, options: Mapping[str, Any]) -> tuple[State, str, str]:
    """State, finding and remedy of a reward: its missing packages, or the first source that is not on this machine."""
    packages: Mapping[str, str] = getattr(reward, "packages", {})
    if absent := [module for module in packages if find_spec(module) is None]:
        requirements = " ".join(dict.fromkeys(repr(packages[module]) for module in absent))
        return "missing", f"not installed: {', '.join(absent)}", f"pip install {requirements}"
    sources = reward.sources(options) if hasattr(reward, "sources") else ()
    for source in sources:
        fault, downloadable = _fault_of_source(source)
        if downloadable:
            state, text, action = _to_download(source.where, source.file, fault, command=source.download)
            copied = f" of `{source.download}`" if state == "missing" else ""
            return state, text, f"{action}; or give the place of a copy{copied} by its option {source.option!r}"
        if fault:
            return "missing", f"{source.where}: {fault}", f"give its place by the reward's option {source.option!r}"
    if not sources:
        return "ok", f"in {getattr(reward, '__module__', type(reward).__module__)}", ""
    return "ok", ", ".join(dict.fromkeys(source.where for source in sources)), ""


def _fault_of_source(source: "RewardFile") -> tuple[str, bool]:
    """The fault of something that a reward loads, empty if it is on this machine; and whether the hub may have it."""
    from solrl_core.families.part_files import missing_in
    from solrl_core.rewards.loading import CONFIG

    def fault_in(folder: Path) -> str:
        return "its weights are missing or incomplete" if source.file == CONFIG and missing_in(folder) else ""

    place = Path(source.where)
    if not source.file:
        return ("" if place.is_file() else "not a file"), False
    if place.is_dir():
        complete = (place / source.file).is_file() and not fault_in(place)
        return ("" if complete else "incomplete"), False
    return _fault_in_cache(source.where, source.file, fault_in)
