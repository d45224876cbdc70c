"""Table of equal_gpus.py: layouts by number of GPUs, measured, or computed from measured parts."""

from collections.abc import Iterator
from dataclasses import dataclass

from training_phase_report import NAMES, Row

ROLL_OUTS = ("naive", "sol_rl", "sol_rl, 4 fitted steps")
"""Recipes, and names of their rows: the samples of one prompt per GPU."""
TRAINING, OLD_TRAINING = "training", "training, baseline"
GPUS = (1, 2, 4, 8)
REGENERATED = ("by the trainer", "by the service", "by both")
INTRODUCTION = """By `torchrun --nproc-per-node 2 benchmarks/equal_gpus.py` on {}: true shapes, random weights, the
presets' settings (24 of 96 candidates, 10 steps in BF16, 6 in FP8), and a reward of CLIP-H's size in float32. All rows
generate with the same compiled BF16 or FP8 transformer. Each part was timed once. 4 fitted steps are a plan that
[plan_fidelity.md](plan_fidelity.md) judges on the miniatures; how FP8 ranks at this size is not known.
The baseline trainer has diffusers' uncompiled blocks and PEFT's layers, and recomputes the activations of FLUX.1 and
SD3.5. Rows with a service are computed from these parts, also those with several serving GPUs. A further table of each
model computes what `regenerate.at=service` gives: all regenerating, or with `regenerate.share` a part of it."""
WANTED = {"flux": (1.35, 1.4, 1.75), "sd3": (1.25, 1.25, 1.5), "sana": (1.15, 1.15, 1.25)}
"""Model → ratio to naive scaling with the same trainer on 1 and on 2 GPUs, and with the baseline trainer."""


@dataclass(frozen=True)
class Layout:
    """Seconds per prompt of a recipe on some GPUs.

    Attributes:
        name: recipe and who does what.
        seconds: per prompt, of all GPUs together.
        measured: false if computed from measured parts.
    """

    name: str
    seconds: float
    measured: bool


def render(rows: list[Row]) -> str:
    """Markdown page of all models."""
    devices = sorted({row["device"] for row in rows})
    lines = [
        "# Is it worth it? Seconds per prompt, with every GPU counted",
        "",
        INTRODUCTION.format(", ".join(devices)),
        "",
    ]
    for model, name in NAMES.items():
        own = {(row["gpus"], row["part"]): row for row in rows if row["model"] == model}
        if all((1, part) in own for part in (*ROLL_OUTS, TRAINING, OLD_TRAINING)):
            lines += [f"## {name}", "", *_parts(own), "", *_layouts(model, own), "", *_served(own), ""]
    return "\n".join(lines)


def _parts(own: dict[tuple[int, str], Row]) -> Iterator[str]:
    yield "| seconds of one prompt on one GPU | |"
    yield "|---|---|"
    for way in ROLL_OUTS:
        row = own[1, way]
        yield f"| {way}: explore | {row['explore']:.2f} |"
        if way != "naive":
            yield f"| {way}: regenerate | {row['regenerate']:.2f} |"
    yield f"| training | {own[1, TRAINING]['s']:.2f} |"
    old = own[1, OLD_TRAINING]
    share = "" if old["timed"] == old["steps"] else f", from {old['timed']} of {old['steps']} timesteps"
    yield f"| training, baseline{share} | {old['s']:.2f} |"


def _layouts(model: str, own: dict[tuple[int, str], Row]) -> Iterator[str]:
    yield "| GPUs | layout | s per prompt | × naive, same trainer | × naive, baseline trainer | |"
    yield "|---|---|---|---|---|---|"
    old = own[1, OLD_TRAINING]["s"]
    best = []
    for gpus in GPUS:
        naive, train = (_of(own, gpus, part) for part in (ROLL_OUTS[0], TRAINING))
        found = sorted(layouts(own, gpus), key=lambda layout: layout.seconds)
        for layout in found:
            same, before = ((naive + training) / gpus / layout.seconds for training in (train, old))
            how = "" if layout.measured else "computed"
            yield f"| {gpus} | {layout.name} | {layout.seconds:.2f} | {same:.2f} | {before:.2f} | {how} |"
        best.append((gpus, found[0].name))
    yield ""
    yield "Best layout: " + "; ".join(f"{gpus} GPU{'s' if gpus > 1 else ''}: {name}" for gpus, name in best) + "."
    one, two, before = WANTED[model]
    yield f"Goals against naive: {one} × on one GPU and {two} × on two, same trainer; {before} × against the baseline."
    if {(2, ROLL_OUTS[-1]), (2, TRAINING)} <= own.keys():
        trained, iteration = (
            2 * sum(own[1, part]["s"] for part in parts) / sum(own[2, part]["s"] for part in parts)
            for parts in ((TRAINING,), (ROLL_OUTS[-1], TRAINING))
        )
        yield f"Two GPUs train {trained:.2f} × as fast as one, and run an iteration {iteration:.2f} × as fast."


def _served(own: dict[tuple[int, str], Row]) -> Iterator[str]:
    yield "Seconds per prompt with a service, by where samples are regenerated; all computed. In brackets: × naive with"
    yield "the same trainer, and the best number of serving and of training GPUs."
    yield ""
    yield "| GPUs | layout | " + " | ".join(REGENERATED) + " |"
    yield "|---|---|" + "---|" * len(REGENERATED)
    for gpus in GPUS[1:]:
        naive = (_of(own, gpus, ROLL_OUTS[0]) + _of(own, gpus, TRAINING)) / gpus
        for way in ROLL_OUTS[1:]:
            for lag in (1, 0):
                each = [regenerated(own, way, gpus, serving, lag) for serving in range(1, gpus)]
                best = [min((found[by], serving) for serving, found in enumerate(each, 1)) for by in REGENERATED]
                cells = [f"{s:.2f} ({naive / s:.2f}, {serving} + {gpus - serving})" for s, serving in best]
                yield f"| {gpus} | {way}, lag {lag} | " + " | ".join(cells) + " |"


def regenerated(own: dict[tuple[int, str], Row], way: str, gpus: int, serving: int, lag: int) -> dict[str, float]:
    """Seconds per prompt by where samples are regenerated, with `serving` of the GPUs for the service.

    The newest version regenerates, so at a lag of one training waits for it, and only training overlaps the exploration
    of the next iteration. With none, exploring overlaps only what the trainers regenerate. If both sides regenerate,
    each does as much as its GPUs can.
    """
    explore, regenerate = own[1, way]["explore"], own[1, way]["regenerate"]
    training = gpus - serving
    explored, trained, here = explore / serving, own[1, TRAINING]["s"] / training, regenerate / training
    if lag:
        seconds = (
            max(explored, here + trained),
            regenerate / serving + max(explored, trained),
            regenerate / gpus + max(explored, trained),
        )
    else:
        # The service helps only if it has explored before the trainers have regenerated.
        together = explored + max(0.0, regenerate - explored * training) / gpus
        seconds = (max(explored, here) + trained, explored + regenerate / serving + trained, together + trained)
    return dict(zip(REGENERATED, seconds, strict=True))


def _of(own: dict[tuple[int, str], Row], gpus: int, part: str) -> float:
    """Seconds of a part for one prompt per GPU, as on one GPU where it was not measured."""
    return float(own.get((gpus, part), own[1, part])["s"])


def layouts(own: dict[tuple[int, str], Row], gpus: int) -> Iterator[Layout]:
    """All layouts on that many GPUs.

    Colocated: every GPU does all stages for its share of the prompts. With a service: it explores on one GPU or more,
    and the others regenerate and train; at a lag of one they wait for nothing but the slower side, and with none
    exploring overlaps regenerating alone.
    """
    train = own[1, TRAINING]["s"]
    for way in ROLL_OUTS:
        measured = {(gpus, way), (gpus, TRAINING)} <= own.keys()
        seconds = (_of(own, gpus, way) + _of(own, gpus, TRAINING)) / gpus
        yield Layout(way if way == "naive" else f"{way}, colocated", seconds, measured)
    for way in ROLL_OUTS[1:]:
        explore, regenerate = own[1, way]["explore"], own[1, way]["regenerate"]
        for lag in (0, 1) if gpus > 1 else ():
            each = []
            for serving in range(1, gpus):
                served, trained = explore / serving, (regenerate / (gpus - serving), train / (gpus - serving))
                each.append((max(served, sum(trained)) if lag else max(served, trained[0]) + trained[1], serving))
            seconds, serving = min(each)
            yield Layout(f"{way}, {serving} serving and {gpus - serving} training, lag {lag}", seconds, False)
