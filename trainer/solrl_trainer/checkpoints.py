"""Checkpoints: everything that a run needs to continue bit for bit, in safetensors and JSON.

A checkpoint is a folder, written under a temporary name and renamed once it is complete.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from safetensors.torch import save as safetensors_bytes
from solrl_core.adapter import Adapter

from solrl_trainer.config import Lora, RunConfig
from solrl_trainer.older_settings import read_settings
from solrl_trainer.policy import CURRENT, OLD, Policy

# Settings that may change when a run resumes.
_FREE = {
    *("iterations", "rollout_url", "patience", "served_as", "output", "device"),
    *("checkpoint_every", "keep_checkpoints", "evaluate", "optimizer.checkpointing"),
}


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint, after `version` iterations.

    `adapters` holds pushed adapter files by version: this version's, and older ones that exploration still needs at
    its lag.
    """

    version: int
    adapters: dict[int, bytes]
    tensors: dict[str, torch.Tensor]
    lora: Lora

    @property
    def averaged(self) -> Adapter:
        """Averaged weights, for evaluation."""
        tensors = {k.removeprefix("averaged/"): v for k, v in self.tensors.items() if k.startswith("averaged/")}
        return Adapter(rank=self.lora.rank, alpha=self.lora.alpha, tensors=tensors)


def save(
    folder: Path,
    version: int,
    adapters: Mapping[int, bytes],
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    config: RunConfig,
) -> Path:
    """Write the checkpoint of `version` and delete all but the newest `keep_checkpoints`."""
    tensors = {f"{name}/{key}": value for name in (CURRENT, OLD) for key, value in policy.tensors(name).items()}
    tensors |= {f"averaged/{key}": value.clone() for key, value in policy.averaged.items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer/{index}/{key}": value.detach().cpu().clone() for key, value in state.items()}
    final, partial = folder / f"{version:06d}", folder / f"{version:06d}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    (partial / "state.safetensors").write_bytes(safetensors_bytes(tensors))
    for pushed, adapter in adapters.items():
        (partial / _file_of(pushed, version)).write_bytes(adapter)
    (partial / "config.json").write_text(config.model_dump_json(indent=1))
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    for old in _complete(folder)[: -config.keep_checkpoints]:
        shutil.rmtree(old)
    return final


def _file_of(pushed: int, version: int) -> str:
    return "adapter.safetensors" if pushed == version else f"adapter-{pushed:06d}.safetensors"


def _complete(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("[0-9]*") if p.suffix != ".partial")


def latest(folder: Path, config: RunConfig) -> Checkpoint | None:
    """Load the newest checkpoint; None if there is none.

    Raises:
        ValueError: it belongs to a run with other settings; names them.
    """
    found = _complete(folder)
    if not found:
        return None
    saved = read_settings((found[-1] / "config.json").read_text())
    then, now = _compared(saved), _compared(config)
    changed = sorted(key for key in now if then.get(key) != now[key])
    if changed:
        shown = "; ".join(f"{key}: then {then.get(key)!r}, now {now[key]!r}" for key in changed)
        raise ValueError(
            f"{found[-1]} belongs to a run with other settings ({shown}); "
            "resume with the same settings, or choose another output folder"
        )
    version = int(found[-1].name)
    older = {int(path.stem.removeprefix("adapter-")): path for path in sorted(found[-1].glob("adapter-*.safetensors"))}
    files = older | {version: found[-1] / _file_of(version, version)}
    return Checkpoint(
        version=version,
        adapters={pushed: path.read_bytes() for pushed, path in files.items()},
        tensors=load_file(found[-1] / "state.safetensors"),
        lora=saved.lora,
    )


def _compared(config: RunConfig) -> dict[str, Any]:
    """Settings that may not change when a run resumes, as JSON."""
    values: dict[str, Any] = json.loads(config.model_dump_json())
    for name in _FREE:
        *sections, last = name.split(".")
        reduce(dict.__getitem__, sections, values).pop(last)
    return values


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
