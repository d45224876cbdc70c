"""Outliers against ranks, remedies and guards: `python benchmarks/outliers.py [--models mini-flux …]`.

Outliers that change nothing in exact arithmetic are added to the miniatures. A row has the rank correlation and the
image error of one precision, what remedies restore, and which parts of the product notice: `solrl-rollout check`, the
check at a service's first load, `solrl-train calibrate` and the floor of `solrl-train run`. Then models without
outliers are loaded, and it is counted how often the first load raises a false alarm.
All layers of the blocks but their modulation are quantised. Everything is emulated, so this runs on a CPU.
Writes docs/results/outliers.{json,md}.
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch
from solrl_core.families import Backbone, load_backbone
from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.fidelity import rank_fidelity
from solrl_core.rewards import RewardSet
from solrl_core.sampling.generator import Generator
from solrl_engine.local_backend import LocalBackend
from solrl_engine.precision_check import FLOOR, Measured, PrecisionCheck, generator_at
from solrl_proto.identifiers import Precision
from solrl_proto.models import RankFidelity
from solrl_proto.rollouts import Plan
from solrl_rollout.check import Checked, checked_precision, read_prompts
from solrl_rollout.engine.first_check import checked_default
from solrl_trainer.calibration.deciding import Requirement, assess
from solrl_trainer.calibration.measuring import Observed
from solrl_trainer.evaluation.held_out import below_floor
from solrl_trainer.settings.presets import resolve
from support.fp8_by_tensor import by_tensor
from support.outliers import add_value_outliers, scale_gated, scale_values
from support.precisions import MODELS, REWARDS
from support.results import Results, Row, command, options, table
from support.static_scales import scale_channels

NAME = "outliers"
PLAN = Plan(steps=6)
TRUE_STEPS = 10
JUDGE = "clipscore"
TRAINER_PROMPTS = 4
WANTED = 0.8
"""Separation that `calibrate` wants by default."""
_CHANNELS = (3, 17, 40, 9, 25, 33, 48, 55, 62, 5, 12, 30)
FORMATS: Mapping[str, tuple[Precision, Callable[[Backbone], Generator]]] = {
    "FP8 by row": ("fp8", lambda backbone: generator_at(backbone, "fp8")),
    "FP8 by tensor": ("fp8", by_tensor),
    "NVFP4": ("nvfp4", lambda backbone: generator_at(backbone, "nvfp4")),
}
ROW_HEAD = (
    *("model", "outliers", "precision", "Spearman", "image error", "layers in BF16: Spearman (layers, FLOPs)"),
    *("static scales: Spearman", "check", "first load", "calibrate", "trainer"),
)


@dataclass(frozen=True)
class Case:
    """Outliers.

    Attributes:
        kind: "added" to values, "scaled" values, or "gated", scaled channels of SANA's feed-forward.
        size: what is added, or the factor.
        channels: number of channels of each layer.
        everywhere: in all blocks, otherwise in the second.
    """

    kind: str
    size: float
    channels: int
    everywhere: bool = False

    def __str__(self) -> str:
        size = f"+{self.size:,.0f}" if self.kind == "added" else f"× {self.size:,.0f}"
        where = "feed-forward" if self.kind == "gated" else "attention"
        return f"{size} in {self.channels} channels, {f'every {where}' if self.everywhere else f'one {where}'}"

    def add_to(self, backbone: PipelineBackbone) -> list[str]:
        """Add them; returns the names of the layers that see them as inputs."""
        ends = (".ff",) if self.kind == "gated" else (".attn2",) if backbone.family == "sana" else (".attn",)
        found = [
            name for name, _ in backbone.transformer.named_modules() if name.endswith(ends) and "single" not in name
        ]
        add = {"added": add_value_outliers, "scaled": scale_values, "gated": scale_gated}[self.kind]
        return [
            f"{name}.{layer}"
            for name in (found if self.everywhere else found[1:2])
            for layer in add(backbone.transformer.get_submodule(name), self.size, _CHANNELS[: self.channels])
        ]


NONE = Case("added", 0, 0)
JOINT = (
    NONE,
    Case("added", 100, 3),
    Case("added", 100, 12),
    Case("added", 1000, 3),
    Case("added", 100, 3, everywhere=True),
    Case("scaled", 2**6, 3),
    Case("scaled", 2**6, 12, everywhere=True),
    Case("scaled", 2**17, 3, everywhere=True),
)
GATED = (
    NONE,
    Case("added", 100, 3),
    Case("added", 1000, 3),
    Case("added", 100, 3, everywhere=True),
    Case("scaled", 2**6, 12, everywhere=True),
    Case("gated", 2**6, 12, everywhere=True),
    Case("gated", 2**12, 12, everywhere=True),
    Case("gated", 2**17, 12, everywhere=True),
)


def _options() -> argparse.ArgumentParser:
    parser = options(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--cases", type=int, nargs="*", default=list(range(len(JOINT))), help="of each model, from 0")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--candidates", type=int, default=24)
    parser.add_argument("--first-loads", action="store_true", help="only these, where a stored row goes unnoticed")
    parser.add_argument("--rewards", nargs="*", default=list(REWARDS), help="of the loads without outliers")
    return parser


class _Backend(LocalBackend):
    """A backend that emulates what this device cannot compute."""

    def __init__(self, backbone: PipelineBackbone, made: Callable[[Backbone], Generator]) -> None:
        super().__init__(backbone)
        self._made = made

    def generator(self, precision: Precision) -> Generator:
        return super().generator(precision) if precision == "bf16" else self._made(self.backbone)


def at_first_load(backbone: PipelineBackbone, rewards: RewardSet, name: str) -> RankFidelity:
    """Result of a service's check at the first load in a format."""
    precision, made = FORMATS[name]
    with tempfile.TemporaryDirectory() as folder:
        found = checked_default(backbone.name, _Backend(backbone, made), rewards, precision, Path(folder))[1]
    assert found is not None
    return found


def measure(model: str, case: Case, prompts: int, candidates: int) -> list[Row]:
    """Measure a case; a row per format."""
    backbone = load_backbone(model)
    backbone.policy = backbone.fp8_policy
    injected = case.add_to(backbone) if case is not NONE else []
    rewards = RewardSet.load([JUDGE], backbone)
    bench = PrecisionCheck(backbone, rewards, read_prompts("shapes", prompts), candidates, PLAN, TRUE_STEPS)
    exact = bench.measure("bf16")
    rows = []
    for name, (precision, made) in FORMATS.items():
        bench.generator_of = lambda backbone, _, made=made: made(backbone)
        checked = checked_precision(bench, precision, exact)
        own = checked.measured.spearman[JUDGE].mean
        bench.generator_of = lambda backbone, _, made=made: _with_static_scales(made(backbone), backbone)
        scaled = bench.measure(precision)
        bench.generator_of = lambda backbone, _, made=made: made(backbone)
        rows.append(
            {
                "model": model,
                "case": str(case) if injected else "none",
                "precision": name,
                "bf16": exact.lowest.mean,
                "spearman": own,
                "image_error": checked.measured.image_error,
                "injected": injected,
                "layers": list(checked.layers.names) if checked.layers else None,
                "share": checked.layers.share if checked.layers else None,
                "restored": checked.restored.lowest.mean if checked.restored else None,
                "static_scales": scaled.lowest.mean,
                "check": _searches(checked, exact),
                "first_load": not at_first_load(backbone, rewards, name).trusted,
                **_by_scores(bench, precision),
            }
        )
    return rows


def measure_first_loads(model: str, case: Case, rows: Sequence[Row]) -> None:
    """Measure again whether the first load notices a case, in the rows of it that it did not."""
    backbone = load_backbone(model)
    backbone.policy = backbone.fp8_policy
    if case is not NONE:
        case.add_to(backbone)
    rewards = RewardSet.load([JUDGE], backbone)
    for row in rows:
        if not row["first_load"]:
            row["first_load"] = not at_first_load(backbone, rewards, row["precision"]).trusted


def _with_static_scales(generator: Generator, backbone: Backbone) -> Generator:
    assert isinstance(backbone, PipelineBackbone)
    scale_channels(generator, backbone)
    return generator


def _searches(checked: Checked, exact: Measured) -> bool:
    """Whether `check` says that the precision falls short."""
    return checked.layers is not None or not checked.ranks or checked.measured.lowest.mean < exact.lowest.mean - 0.1


def _by_scores(bench: PrecisionCheck, precision: Precision) -> dict[str, bool]:
    """Whether `calibrate` surely refuses six steps at the precision, and whether a run stops."""
    scores, true = (torch.stack(one[JUDGE]) for one in (bench.scores(precision), bench.true))
    prompts, candidates = scores.shape
    plan = PLAN.model_copy(update={"precision": precision})
    seen = Observed(plan, scores, torch.full_like(scores, torch.nan), np.ones(prompts))
    (one,) = assess([seen], true, keep=candidates // 4, reference=plan)
    group = [f"explore.candidates={candidates}", f"explore.keep={candidates // 4}"]
    config = resolve("mini-flux/sol_rl/clipscore", overrides=group).config
    few = min(TRAINER_PROMPTS, prompts)
    ranks = rank_fidelity(scores[:few], true[:few], keep=candidates // 4).spearman
    return {"calibrate": Requirement(WANTED).missed(one), "trainer": below_floor(config, ranks, few)}


def clean_loads(model: str, names: Sequence[str]) -> list[Row]:
    """First loads of a miniature as it is, with its own layer lists; a row per format and reward."""
    backbone = load_backbone(model)
    rewards = RewardSet.load(names, backbone)
    return [
        {
            "model": model,
            "precision": one,
            "reward": name,
            "spearman": found.spearman,
            "noticed": not found.trusted,
        }
        for name in names
        for one in ("FP8 by row", "NVFP4")
        for found in [at_first_load(backbone, rewards.only([name]), one)]
    ]


def page(found: Mapping[str, Any]) -> str:
    """Markdown page."""
    rows: list[Row] = found["rows"]
    broken = [row for row in rows if row["spearman"] < FLOOR]
    searched = [row for row in broken if row["injected"]]
    lists = [row for row in searched if set(row["layers"] or ()) & set(row["injected"])]
    loads = found.get("clean", [])
    noticed = {name: sum(row[name] for row in broken) for name in ("check", "first_load", "calibrate", "trainer")}
    lines = [
        "# Outliers",
        "",
        f"By `{command(NAME, _options(), found)}`, on a CPU: {found['prompts']} held-out prompts ×",
        f"{found['candidates']} candidates, {PLAN.steps} Euler steps against {TRUE_STEPS} in BF16, by {JUDGE}.",
        "The outliers change nothing in exact arithmetic, and BF16 by at most its rounding, because",
        "activations are float32 on a CPU. All layers of the blocks but their modulation are quantised, every",
        "precision is emulated, and the seeds are fixed.",
        "",
        f"- {len(broken)} rows have a Spearman correlation below {FLOOR:g}. Of these, the check at the first load",
        f"  notices {noticed['first_load']}, `solrl-rollout check` {noticed['check']}, `calibrate` (surely less",
        f"  separation than {WANTED:g}) {noticed['calibrate']}, and the trainer's floor stops {noticed['trainer']}.",
        f"- Of {len(loads)} first loads of miniatures without outliers, with their own layer lists,",
        f"  {sum(row['noticed'] for row in loads)} raise an alarm.",
        f"- Of {len(searched)} such rows, the search names layers that see them in {len(lists)}, and with",
        f"  its list {sum((row['restored'] or 0) >= FLOOR for row in searched)} rank above {FLOOR:g} again.",
        "- *Static scales* divide a layer's inputs by constants, which its weights take up. The product has none, see",
        "  [why](../method.md#outliers).",
        "",
        *table(ROW_HEAD, map(_cells, rows)),
        "",
        "First loads without outliers:",
        "",
        *table(
            ("model", "precision", "reward", "Spearman", "alarm"),
            (
                (
                    *(row[name] for name in ("model", "precision", "reward")),
                    f"{row['spearman']:.2f}",
                    _said(row["noticed"]),
                )
                for row in loads
            ),
        ),
    ]
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> Sequence[str]:
    layers = row["layers"]
    if layers is None:
        restored = "none helps" if row["check"] else ""
    else:
        restored = f"{row['restored']:.2f} ({len(layers)}, {row['share']:.1%})"
    return (
        *(row[name] for name in ("model", "case", "precision")),
        f"{row['spearman']:.2f}",
        f"{row['image_error']:.1%}",
        restored,
        f"{row['static_scales']:.2f}",
        *(_said(row[name]) for name in ("check", "first_load", "calibrate", "trainer")),
    )


def _said(noticed: bool) -> str:
    return "yes" if noticed else "no"


def main() -> None:
    """Measure, print the page and write it."""
    args = _options().parse_args()
    results = Results(NAME, args.out, page)
    if not args.render:
        results.found |= {name: getattr(args, name) for name in ("prompts", "candidates")}
    for model in () if args.render else args.models:
        cases = GATED if model == "mini-sana" else JOINT
        for case in (cases[at] for at in args.cases):
            if args.first_loads:
                name = "none" if case is NONE else str(case)
                rows = [row for row in results.rows if (row["model"], row["case"]) == (model, name)]
                measure_first_loads(model, case, rows)
                results.write()
                continue
            for row in measure(model, case, args.prompts, args.candidates):
                results.add(row, "model", "case", "precision")
        loads = [row for row in results.found.get("clean", []) if row["model"] != model or not args.rewards]
        results.found["clean"] = loads + clean_loads(model, args.rewards)
        results.write()
    results.show()


if __name__ == "__main__":
    main()
