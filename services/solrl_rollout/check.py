"""`solrl-rollout check`: does this model rank at this precision on this machine?"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from solrl_core.devices import require_device
from solrl_core.families import load_backbone
from solrl_core.families.own_pipeline import by_own_pipeline
from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.fingerprint import module_digest
from solrl_core.image_files import tiled
from solrl_core.precision.support import supported_precisions
from solrl_core.registry import FolderRegistry
from solrl_core.rewards import RewardSet
from solrl_core.rewards.images import as_pil
from solrl_core.sampling.generator import Generator
from solrl_engine.precision_check import FLOOR, PROMPTS, Measured, PrecisionCheck
from solrl_proto.identifiers import Precision
from solrl_proto.rollouts import Plan, PromptItem
from solrl_proto.text_files import parse_json, read_lines
from solrl_remote.remote_reward import connect_reward
from torch import Tensor

from solrl_rollout.options import Check

_PROMPT_SETS = FolderRegistry("prompts", "solrl.prompts", others=("a text file", "a folder with test.txt"))
_FEWEST_PROMPTS = 2
_SHOWN = 8


def check(options: Check, prompts: Sequence[PromptItem]) -> int:
    """Print how each precision ranks; with `out`, write check.json and images into that folder.

    Args:
        options: the model and its options. Without precisions, all that the device computes natively are checked, and
            NVFP4 elsewhere.
        prompts: at least two.

    Returns:
        The exit status: 1 if a precision does not rank or BF16 differs from diffusers, otherwise 3 if the prompts do
        not decide whether a precision ranks, and 0 if each does.

    Raises:
        ValueError, OSError: something cannot be loaded, or a number is too small.
    """
    model, candidates, rewards, out = options.model, options.candidates, options.rewards, options.out
    if len(prompts) < _FEWEST_PROMPTS or candidates < 8:
        raise ValueError(
            f"got {len(prompts)} prompts with {candidates} candidates; expected at least {_FEWEST_PROMPTS} with 8, "
            "because ranks are compared within a prompt"
        )
    console, device = Console(markup=False), require_device(options.device)
    print(f"loading {model} and {', '.join(rewards)}", file=sys.stderr)
    backbone = load_backbone(model, device=device, revision=options.revision, size=options.size)
    judges = RewardSet.load(rewards, backbone, options.reward_options, connect=connect_reward)
    parity = pipeline_difference(backbone, prompts[0], options.true_steps)
    equal = parity < 0.01
    level = "equal up to rounding" if equal else "NOT equal: report this model to the project"
    console.print(
        f"BF16 against the model's own diffusers pipeline: pixels differ by {parity:.4f} of 1 on average, {level}."
    )
    print(f"generating {len(prompts)} × {candidates} candidates in BF16", file=sys.stderr)
    plan = Plan(steps=options.steps, solver=options.solver)
    benchmark = PrecisionCheck(backbone, judges, prompts, candidates, plan, options.true_steps)
    checked = {}
    for precision in options.precision or [name for name in supported_precisions(backbone.device) if name != "bf16"]:
        print(f"checking {precision}", file=sys.stderr)
        checked[precision] = benchmark.measure(precision)
    console.print(*_tables(model, benchmark.bf16, checked, candidates), sep="\n")
    failing = [precision for precision, measured in checked.items() if measured.ranks is False]
    undecided = [precision for precision, measured in checked.items() if measured.ranks is None]
    if failing:
        console.print(
            f"{model} does not rank at {', '.join(failing)}: Spearman is below {FLOOR:g}. Use another precision."
        )
    if undecided:
        console.print(
            f"{model} is undecided at {', '.join(undecided)}: Spearman's interval contains {FLOOR:g}. Raise --groups."
        )
    if out is not None:
        content = {
            "transformer": module_digest(backbone.transformer, backbone.device),
            "pipeline_difference": parity,
            "prompts": len(prompts),
            "candidates": candidates,
            "plan": plan.model_dump(mode="json"),
            "true_steps": options.true_steps,
            "bf16": asdict(benchmark.bf16),
            "precisions": {
                precision: asdict(measured) | {"ranks": measured.ranks} for precision, measured in checked.items()
            },
        }
        _write(out, content, benchmark.images)
    return 1 if failing or not equal else 3 if undecided else 0


def read_prompts(name: str | None, count: int) -> Sequence[PromptItem]:
    """The first prompts of a text file, or of the held-out prompts of a registered set; by default `PROMPTS`.

    Raises:
        ValueError: neither, or it has no prompt.
        OSError: it cannot be read.
    """
    if name is None:
        return PROMPTS[:count]
    file = Path(name)
    if not file.is_file():
        folder = Path(_PROMPT_SETS.locate(name))
        file = folder / "test.txt"
        rows = folder / "test_metadata.jsonl"
        if rows.is_file():
            records = [parse_json(line, f"{rows}:{i}") for i, line in enumerate(read_lines(rows), 1) if line.strip()]
            return [PromptItem(id=str(i), text=row["prompt"], metadata=row) for i, row in enumerate(records[:count], 1)]
    texts = [line.strip() for line in read_lines(file) if line.strip()][:count]
    return [PromptItem(id=str(i), text=text) for i, text in enumerate(texts, 1)]


def pipeline_difference(backbone: PipelineBackbone, prompt: PromptItem, steps: int) -> float:
    """Mean absolute difference of an image to that of the model's diffusers pipeline; pixels are in [0, 1]."""
    ours = Generator(backbone, "bf16").generate(prompt.text, [0], steps=steps).images
    theirs = by_own_pipeline(backbone, [prompt.text], [0], steps)
    return float((ours.cpu().float() - theirs.cpu().float()).abs().mean())


def _tables(model: str, exact: Measured, checked: Mapping[Precision, Measured], candidates: int) -> list[Table]:
    """Ranks by precision and reward, and errors and speed by precision; each fits into 80 columns."""
    ranks = Table(
        title=f"{model}: ranks among {candidates}, 1 is the best in BF16 with all steps", title_justify="left"
    )
    for name in ("precision", "reward", "Spearman [95 %]", "best's", "worst's"):
        ranks.add_column(name)
    errors = Table(title="Differences to BF16 with as many steps", title_justify="left")
    for name in ("precision", "latents", "images", "unusable", "× BF16's speed"):
        errors.add_column(name, justify="left" if name == "precision" else "right")
    for name, measured in [("bf16", exact), *checked.items()]:
        # The time of an emulation is no measure of the emulated hardware.
        emulated = measured.numerics == "emulated" and measured is not exact
        speed = "emulated" if emulated else f"{exact.step_seconds / measured.step_seconds:.2f}"
        shares = (measured.latent_error, measured.image_error)
        errors.add_row(name, *(f"{share:.1%}" for share in shares), f"{measured.unusable:.0%}", speed)
        for reward, correlation in measured.spearman.items():
            interval = f"{correlation.mean:.2f} [{correlation.low:.2f}, {correlation.high:.2f}]"
            ranks.add_row(name, reward, interval, f"{measured.best[reward]:.1f}", f"{measured.worst[reward]:.1f}")
    return [ranks, errors]


def _write(out: Path, content: Mapping[str, Any], images: Mapping[str, Tensor]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "check.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    for precision, candidates in images.items():
        folder = out / precision
        folder.mkdir(exist_ok=True)
        for seed, image in enumerate(as_pil(tiled(candidates[:_SHOWN].nan_to_num(0.0), columns=4))):
            image.save(folder / f"{seed}.png")
    print(f"results and images: {out}", file=sys.stderr)
