"""Checkpoints: everything that a run needs to continue bit for bit, in safetensors and JSON.

A checkpoint is a folder, written under a temporary name and renamed once it is complete. Its checksums.json has the
SHA-256 of every other file, so that later damage is detected.
"""

import hashlib
import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file
from safetensors.torch import save as safetensors_bytes
from solrl_core.adapter import Adapter
from solrl_proto.adapters import AdapterFile
from solrl_proto.text_files import read_json

from solrl_trainer.policy.policy import CURRENT, OLD, Policy
from solrl_trainer.ranks.communicator import Communicator, broadcast_bytes
from solrl_trainer.records.output_files import write_file, writing
from solrl_trainer.settings.config import RunConfig

CHECKSUMS = "checksums.json"
PARTS = "parts.json"


class DamagedCheckpointError(ValueError):
    """A checkpoint differs from what was written."""


@dataclass(frozen=True)
class Origin:
    """Settings and other parts that a checkpoint was trained with.

    Attributes:
        path: the checkpoint's folder.
        version: number of iterations.
        config: the run's settings.
        parts: digests and versions of what the training depended on beside them, by name.
    """

    path: Path
    version: int
    config: RunConfig
    parts: Mapping[str, str]


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint.

    `adapters` has pushed adapter files by version: this version's, and older ones that exploration still needs at
    its lag.
    """

    origin: Origin
    adapters: dict[int, bytes]
    tensors: dict[str, torch.Tensor]

    @property
    def version(self) -> int:
        """Number of iterations after which it was written."""
        return self.origin.version

    @property
    def scores(self) -> torch.Tensor | None:
        """Scores [groups, kept] of the newest iteration, if it has any."""
        return self.tensors.get("scores")

    @property
    def averaged(self) -> Adapter:
        """Averaged weights, for evaluation."""
        tensors = {k.removeprefix("averaged/"): v for k, v in self.tensors.items() if k.startswith("averaged/")}
        lora = self.origin.config.lora
        return Adapter(rank=lora.rank, alpha=lora.alpha, tensors=tensors)


def save(
    folder: Path,
    version: int,
    adapters: Mapping[int, bytes],
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    config: RunConfig,
    held_out: Mapping[int, float] | None = None,
    parts: Mapping[str, str] | None = None,
    scores: torch.Tensor | None = None,
) -> Path:
    """Write the checkpoint of `version`; keep the newest `keep_checkpoints`, and the best by held-out reward.

    Args:
        folder: of all checkpoints.
        version: of the adapter that the next iteration explores and trains with.
        adapters: adapter files by version: this version's, and older ones that exploration still needs.
        policy, optimizer: state of the training.
        config: the run's settings.
        held_out: reward by version, as far as evaluated.
        parts: digests and versions of what the training depends on beside its settings, by name.
        scores: [groups, kept] of the newest iteration.
    """
    tensors = {f"{name}/{key}": value for name in (CURRENT, OLD) for key, value in policy.tensors(name).items()}
    tensors |= {f"averaged/{key}": value.clone() for key, value in policy.averaged.items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer/{index}/{key}": value.detach().cpu().clone() for key, value in state.items()}
    if scores is not None:
        tensors["scores"] = scores
    final, partial = folder / f"{version:06d}", folder / f"{version:06d}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    with writing(partial):
        partial.mkdir(parents=True)
    write_file(partial / "state.safetensors", safetensors_bytes(tensors))
    for pushed, adapter in adapters.items():
        write_file(partial / _file_of(pushed, version), adapter)
    write_file(partial / "config.json", config.model_dump_json(indent=1))
    write_file(partial / PARTS, json.dumps(dict(parts or {}), indent=1) + "\n")
    checksums = {path.name: _checksum(path) for path in sorted(partial.iterdir())}
    write_file(partial / CHECKSUMS, json.dumps(checksums, indent=1) + "\n")
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


def broadcast(found: Checkpoint | None, world: Communicator) -> Checkpoint | None:
    """Rank 0's checkpoint, on every rank; only rank 0's file system may have it."""
    if world.size == 1:
        return found
    told = json.loads(broadcast_bytes(_told(found) if world.rank == 0 else None, world))
    if told is None:
        return None
    data = None
    if found is not None:
        files = {f"adapter/{v}": torch.frombuffer(bytearray(f), dtype=torch.uint8) for v, f in found.adapters.items()}
        data = safetensors_bytes({f"state/{name}": value for name, value in found.tensors.items()} | files)
    sent = load(broadcast_bytes(data, world))
    if found is not None:
        return found

    def part(name: str) -> dict[str, torch.Tensor]:
        return {k.removeprefix(f"{name}/"): v for k, v in sent.items() if k.startswith(f"{name}/")}

    adapters = {int(v): file.numpy().tobytes() for v, file in part("adapter").items()}
    newest_last = dict(sorted(adapters.items()))
    path, version, config, parts = told
    origin = Origin(Path(path), version, RunConfig.model_validate(config), parts)
    return Checkpoint(origin, newest_last, part("state"))


def _told(found: Checkpoint | None) -> bytes:
    if found is None:
        return b"null"
    one = found.origin
    return json.dumps([str(one.path), one.version, one.config.model_dump(mode="json"), dict(one.parts)]).encode()


def drop_after(folder: Path, version: int) -> None:
    """Delete the checkpoints of later versions, which a run that continues from `version` writes again."""
    for path in _complete(folder):
        if int(path.name) > version:
            shutil.rmtree(path)


def newest_origin(folder: Path, version: int | None = None) -> Origin | None:
    """Origin of the newest readable checkpoint, or of that of `version`; None if there is none."""
    for path in reversed(_complete(folder)):
        if version in (None, int(path.name)):
            try:
                _verify(path, only=("config.json", PARTS))
                return _origin(path)
            except (OSError, ValueError):  # damaged, as `latest` reports
                continue
    return None


def latest(folder: Path, version: int | None = None) -> Checkpoint | None:
    """Read the newest checkpoint, or that of `version`; None if there is none.

    Raises:
        ValueError: there is none of `version`.
        DamagedCheckpointError: a file is damaged. Names the file, and the newest intact checkpoint.
    """
    found = _complete(folder)
    if not found:
        if version is not None:
            raise ValueError(f"{folder} has no checkpoint; expected that of version {version}")
        return None
    path = found[-1]
    if version is not None:
        by_version = {int(path.name): path for path in found}
        if version not in by_version:
            raise ValueError(f"{folder} has no checkpoint of version {version}; expected one of {sorted(by_version)}")
        path = by_version[version]
    try:
        return _read(path)
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(f"{error}. {_offer(found, path)}") from None


def require(folder: Path, version: int | None = None) -> Checkpoint:
    """Read a checkpoint that must exist; raises as `latest`, and FileNotFoundError if there is none."""
    found = latest(folder, version)
    if found is None:
        raise FileNotFoundError(f"{folder.parent} has no checkpoint yet; the first is written after an iteration")
    return found


def _read(path: Path) -> Checkpoint:
    _verify(path)
    version = int(path.name)
    older = {int(file.stem.removeprefix("adapter-")): file for file in sorted(path.glob("adapter-*.safetensors"))}
    files = older | {version: path / _file_of(version, version)}
    try:
        return Checkpoint(
            origin=_origin(path),
            adapters={pushed: AdapterFile(file.read_bytes()) for pushed, file in files.items()},
            tensors=load_file(path / "state.safetensors"),
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise DamagedCheckpointError(f"checkpoint {path} is damaged: {error}") from error


def _origin(path: Path) -> Origin:
    """Origin of the checkpoint in a folder; ValueError or OSError if it cannot be read."""
    config = RunConfig.model_validate(read_json(path / "config.json"))
    return Origin(path, int(path.name), config, read_json(path / PARTS))


def _verify(path: Path, only: Collection[str] = ()) -> None:
    """Compare every file, or those named, with its checksum.

    Raises:
        DamagedCheckpointError: a file differs or is missing.
    """
    if not (path / CHECKSUMS).is_file():
        raise DamagedCheckpointError(f"checkpoint {path} is damaged: {CHECKSUMS} is missing")
    try:
        checksums = dict(read_json(path / CHECKSUMS))
    except (ValueError, TypeError) as error:
        raise DamagedCheckpointError(f"checkpoint {path} is damaged: {CHECKSUMS} cannot be read ({error})") from error
    for name, expected in checksums.items():
        if not only or name in only:
            got = _checksum(path / name) if (path / name).is_file() else "missing"
            if got != expected:
                raise DamagedCheckpointError(f"checkpoint {path} is damaged: {name} is {got}, expected {expected}")


def _offer(found: Sequence[Path], damaged: Path) -> str:
    """The newest intact checkpoint apart from a damaged one, as a remedy."""
    for path in reversed(found):
        if path != damaged:
            try:
                _read(path)
            except DamagedCheckpointError:
                continue
            return f"{path.name} is intact: use it with --checkpoint {int(path.name)}"
    return "No other checkpoint is intact: start a new run with another --run"


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def _file_of(pushed: int, version: int) -> str:
    return "adapter.safetensors" if pushed == version else f"adapter-{pushed:06d}.safetensors"


def _complete(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("[0-9]*") if path.name.isdigit())


def restore(checkpoint: Checkpoint, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Restore weights and optimiser state from a checkpoint."""

    def part(name: str) -> dict[str, torch.Tensor]:
        return {k.removeprefix(f"{name}/"): v for k, v in checkpoint.tensors.items() if k.startswith(f"{name}/")}

    for name in (CURRENT, OLD):
        policy.restore(name, part(name))
    policy.averaged = part("averaged")
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in part("optimizer").items():
        index, _, name = key.partition("/")
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
