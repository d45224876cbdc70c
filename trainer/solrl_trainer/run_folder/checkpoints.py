"""Checkpoints: everything that a run needs to continue bit for bit, in safetensors and JSON.

A checkpoint is a folder, written under a temporary name and renamed once it is complete. Its checksums.json has the
SHA-256 of every other file, so that later damage is detected. Nothing else in the folder is read.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from safetensors.torch import save as safetensors_bytes
from solrl_core.adapter import Adapter
from solrl_proto.adapters import AdapterFile

from solrl_trainer.policy.policy import CURRENT, OLD, Policy
from solrl_trainer.ranks.communicator import Communicator, broadcast_bytes
from solrl_trainer.run_folder.output_files import write_file, writing
from solrl_trainer.settings.config import RunConfig

CHECKSUMS, CONFIG, PARTS, STATE = "checksums.json", "config.json", "parts.json", "state.safetensors"
ADAPTER = "adapter.safetensors"
_OLDER_ADAPTER = re.compile(r"adapter-([0-9]{6,9})\.safetensors")


class DamagedCheckpointError(ValueError):
    """A checkpoint differs from what was written."""


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint, written after `version` iterations.

    Attributes:
        parts: digests and versions of what the training depended on beside them, by name.
        adapters: pushed adapter files by version: older ones that exploration still needs at its lag, and this one's.
        tensors: state of the training, by name.
    """

    path: Path
    version: int
    config: RunConfig
    parts: Mapping[str, str]
    adapters: Mapping[int, bytes]
    tensors: dict[str, torch.Tensor]

    @property
    def averaged(self) -> Adapter:
        """Averaged weights, for evaluation."""
        return Adapter(rank=self.config.lora.rank, alpha=self.config.lora.alpha, tensors=self.part("averaged"))

    def part(self, name: str) -> dict[str, torch.Tensor]:
        """Tensors of one part of the state."""
        return {k.removeprefix(f"{name}/"): v for k, v in self.tensors.items() if k.startswith(f"{name}/")}


def save(
    folder: Path,
    version: int,
    adapters: Mapping[int, bytes],
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    config: RunConfig,
    held_out: Mapping[int, float] | None = None,
    parts: Mapping[str, str] | None = None,
) -> Path:
    """Write the checkpoint of `version`; keep the newest `keep_checkpoints`, and the best by held-out reward.

    The next iteration explores and trains with `version`. The adapter files are this version's, and older ones that
    exploration still needs; `held_out` is the reward by version, as far as evaluated; `parts` are digests and versions
    of what the training depends on beside its settings.
    """
    tensors = {f"{name}/{key}": value for name in (CURRENT, OLD) for key, value in policy.tensors(name).items()}
    tensors |= {f"averaged/{key}": value.clone() for key, value in policy.averaged.items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer/{index}/{key}": value.detach().cpu().clone() for key, value in state.items()}
    final, partial = folder / f"{version:06d}", folder / f"{version:06d}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    with writing(partial):
        partial.mkdir(parents=True)
    files = {f"adapter-{pushed:06d}.safetensors": adapter for pushed, adapter in adapters.items() if pushed != version}
    files[ADAPTER] = adapters[version]
    files[CONFIG] = config.model_dump_json(indent=1).encode()
    files[PARTS] = json.dumps(dict(parts or {}), indent=1).encode()
    files[STATE] = safetensors_bytes(tensors)
    files[CHECKSUMS] = json.dumps({name: _checksum(data) for name, data in files.items()}, indent=1).encode()
    for name, data in files.items():
        write_file(partial / name, data)
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    best = best_kept(folder, held_out or {})
    for old in _complete(folder)[: -config.keep_checkpoints]:
        if int(old.name) != best:
            shutil.rmtree(old)
    return final


def best_kept(folder: Path, held_out: Mapping[int, float]) -> int | None:
    """Version of the kept checkpoint with the highest held-out reward; None if none was evaluated."""
    evaluated = [int(path.name) for path in _complete(folder) if int(path.name) in held_out]
    return max(evaluated, key=lambda version: held_out[version], default=None)


def drop_after(folder: Path, version: int) -> None:
    """Delete the checkpoints of later versions, which a run that continues from `version` writes again."""
    for path in _complete(folder):
        if int(path.name) > version:
            shutil.rmtree(path)


def latest(folder: Path, version: int | None = None, world: Communicator | None = None) -> Checkpoint | None:
    """Read the newest checkpoint, or that of `version`; None if there is none.

    With several ranks, all get rank 0's; only its file system may have it.

    Raises:
        ValueError: there is none of `version`.
        DamagedCheckpointError: a file is damaged. Names the file, and the newest intact checkpoint.
    """
    world = world or Communicator()
    checkpoint = _newest(folder, version) if world.rank == 0 else None
    if world.size == 1:
        return checkpoint
    files: dict[str, bytes] = {}
    if checkpoint is not None:
        files = {f"{checkpoint.path.name}/{name}": data for name, data in _files(checkpoint.path).items()}
    tensors = {name: torch.frombuffer(bytearray(data), dtype=torch.uint8) for name, data in files.items()}
    sent = load(broadcast_bytes(safetensors_bytes(tensors) if world.rank == 0 else None, world))
    if checkpoint is not None or not sent:
        return checkpoint
    path = folder / next(iter(sent)).partition("/")[0]
    return _parsed(path, {name.partition("/")[2]: data.numpy().tobytes() for name, data in sent.items()})


def require(folder: Path, version: int | None = None, world: Communicator | None = None) -> Checkpoint:
    """Read a checkpoint that must exist. FileNotFoundError: there is none; `latest` lists all other errors."""
    checkpoint = latest(folder, version, world)
    if checkpoint is None:
        raise FileNotFoundError(f"{folder.parent} has no checkpoint yet; the first is written after an iteration")
    return checkpoint


def _newest(folder: Path, version: int | None) -> Checkpoint | None:
    paths = {int(path.name): path for path in _complete(folder)}
    if version is not None and version not in paths:
        raise ValueError(f"{folder} has no checkpoint of version {version}; expected one of {sorted(paths)}")
    if not paths:
        return None
    path = paths[max(paths) if version is None else version]
    try:
        return _parsed(path, _files(path))
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(f"{error}. {_offer(list(paths.values()), path)}") from None


def _files(path: Path) -> dict[str, bytes]:
    """The files of a checkpoint by name; DamagedCheckpointError if one differs from its checksum, or is missing."""
    listed = _read(path / CHECKSUMS)
    try:
        checksums = dict(json.loads(listed or b""))
    except (ValueError, TypeError) as error:
        raise DamagedCheckpointError(
            f"checkpoint {path} is damaged: {CHECKSUMS} is missing or cannot be read ({error})"
        ) from error
    required = {CONFIG, PARTS, STATE, ADAPTER}
    if odd := sorted(required.symmetric_difference(name for name in checksums if not _OLDER_ADAPTER.fullmatch(name))):
        raise DamagedCheckpointError(
            f"checkpoint {path} is damaged: {CHECKSUMS} names {', '.join(map(repr, checksums)) or 'no file'}; expected "
            f"{', '.join(sorted(required))} and adapter-VERSION.safetensors alone, which differs in {odd[0]!r}"
        )
    files = {}
    for name, expected in checksums.items():
        data = _read(path / name)
        got = "missing, or no regular file" if data is None else _checksum(data)
        if data is None or got != expected:
            raise DamagedCheckpointError(f"checkpoint {path} is damaged: {name} is {got}, expected {expected}")
        files[name] = data
    return files


def _read(path: Path) -> bytes | None:
    """The content of a regular file; None if there is none, or a link, pipe or device in its place."""
    return path.read_bytes() if path.is_file() and not path.is_symlink() else None


def _parsed(path: Path, files: Mapping[str, bytes]) -> Checkpoint:
    version = int(path.name)
    older = {
        int(match[1]): AdapterFile(data)
        for name, data in sorted(files.items())
        if (match := _OLDER_ADAPTER.fullmatch(name))
    }
    try:
        return Checkpoint(
            path,
            version,
            RunConfig.model_validate_json(files[CONFIG]),
            json.loads(files[PARTS]),
            older | {version: AdapterFile(files[ADAPTER])},
            load(files[STATE]),
        )
    except (KeyError, ValueError, SafetensorError) as error:
        raise DamagedCheckpointError(f"checkpoint {path} is damaged: {error}") from error


def _offer(checkpoints: Sequence[Path], damaged: Path) -> str:
    """The newest intact checkpoint apart from a damaged one, as a remedy."""
    for path in reversed(checkpoints):
        if path != damaged:
            try:
                _files(path)
            except DamagedCheckpointError:
                continue
            return f"{path.name} is intact: use it with --checkpoint {int(path.name)}"
    return "No other checkpoint is intact: start a new run with another --run"


def _checksum(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def _complete(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("[0-9]*") if path.name.isdigit())


def restore(checkpoint: Checkpoint, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Restore weights and optimiser state from a checkpoint."""

    for name in (CURRENT, OLD):
        policy.restore(name, checkpoint.part(name))
    policy.averaged = checkpoint.part("averaged")
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in checkpoint.part("optimizer").items():
        index, _, name = key.partition("/")
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
