"""Content and files of a calibration: calibration.json and plan.yaml."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from solrl_core.model_options import ImageSize
from solrl_proto.rollouts import ModelBinding, Plan

from solrl_trainer.calibration.deciding import MeasuredPlan, Requirement
from solrl_trainer.calibration.plans import name
from solrl_trainer.run_folder.output_files import write_file
from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.yaml_text import dump_yaml


def content(
    config: RunConfig,
    measured: Sequence[MeasuredPlan],
    requirement: Requirement,
    chosen: MeasuredPlan | None,
    reference: Plan,
    verdict: Sequence[str],
) -> dict[str, Any]:
    """Content of calibration.json; other plans are compared with the `reference`."""
    return {
        "model": config.model,
        "rewards": config.rewards,
        "prompts": len(measured[0].times),
        "candidates": config.explore.candidates,
        "keep": config.explore.keep,
        "wanted": requirement.separation,
        "allowed_loss": requirement.loss,
        "reference": name(reference),
        "chosen": name(chosen.plan) if chosen else None,
        "verdict": list(verdict),
        "plans": [_row(one) for one in measured],
    }


def _row(measured: MeasuredPlan) -> dict[str, Any]:
    return {
        "name": name(measured.plan),
        "plan": measured.plan.model_dump(mode="json"),
        "seconds": measured.seconds,
        "seconds_quartiles": list(measured.quartiles),
        "cost": measured.cost.value,
        "cost_interval": [measured.cost.low, measured.cost.high],
        "separation": measured.separation.value,
        "interval": [measured.separation.low, measured.separation.high],
        "loss": measured.loss.value,
        "loss_interval": [measured.loss.low, measured.loss.high],
        "pace": measured.pace,
        **vars(measured.fidelity),
    }


def frontier(plans: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows of calibration.json's `plans` that no other one is both cheaper and better than, the cheapest first."""
    optimal: list[Mapping[str, Any]] = []
    for row in sorted(plans, key=lambda row: (row["seconds"], -row["separation"])):
        if not optimal or row["separation"] > optimal[-1]["separation"]:
            optimal.append(row)
    return optimal


def write(
    folder: Path,
    summary: Mapping[str, Any],
    chosen: MeasuredPlan | None,
    binding: ModelBinding,
    size: ImageSize,
    layers: Path | None,
) -> None:
    """Write the files, with the `summary` of `content`; plan.yaml only if a plan was chosen.

    It was chosen for the `binding` and images of this `size`, with the layer list `layers`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / "calibration.json", json.dumps(summary, indent=1) + "\n")
    if chosen is not None:
        fields = {"steps", "precision", "prune", "fitted"}
        plan = chosen.plan.model_dump(mode="json", include=fields)
        plan["calibrated_for"] = binding.model_dump(mode="json")
        settings = {"explore": plan, "generate": {name: value for name, value in size._asdict().items() if value}} | (
            {} if layers is None else {"layers": str(layers.resolve())}
        )
        write_file(folder / "plan.yaml", dump_yaml(settings))
