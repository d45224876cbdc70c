"""Tables and plot for `rollout_phase.py`."""

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

PARTS = ("transformer", "encode", "decode", "reward", "other")
NAMES = {"flux": "FLUX.1", "sd3": "SD3.5-L", "sana": "SANA 1.6B"}
UNPRUNED, REGENERATE, BASELINE = "6 steps", "regenerate", "baseline"
FP8 = ", decoded in FP8"


class Goals(NamedTuple):
    """Wanted speed-up with six steps and with a cheaper plan, the paper's, and the share outside the transformer."""

    unpruned: float
    cheaper: float
    paper: float
    outside: float


GOALS = {
    "flux": Goals(1.68, 2.1, 2.33, 0.06),
    "sd3": Goals(1.55, 1.95, 2.41, 0.09),
    "sana": Goals(1.4, 1.6, 1.41, 0.35),
}


def render(result: Mapping[str, Any], out: Path) -> str:
    """Write the tables and, if matplotlib is installed, the plot; return the tables."""
    text = table(result)
    (out / "rollout_phase.md").write_text(text)
    if importlib.util.find_spec("matplotlib"):
        plot(result, out / "rollout_phase.png")
    return text


def table(result: Mapping[str, Any]) -> str:
    """Markdown tables of the measured parts."""
    models = {name: result["models"][name] for name in NAMES if name in result["models"]}
    devices = {one["setting"]["device"] for one in models.values() if "setting" in one}
    lines = [
        "# Rollout phase",
        "",
        f"By `python benchmarks/rollout_phase.py` on one {' or '.join(sorted(devices))}: models at true size",
        "with their text encoders and autoencoders, and HPSv2 with its CLIP ViT-H/14. The weights are random; time",
        "does not depend on them. Candidates are generated as in the service, without its queue and HTTP: 24 at a",
        "time, scored while the next 24 are generated.",
        "",
        "## Rollout phase",
        "",
        "A phase explores 96 candidates and regenerates 24 of them in BF16 at 10 steps. The baseline generates all 96",
        "in BF16 at 10 steps, and is measured once. Of several rounds, times are medians. Goal: what the project",
        "wants to reach. Decoded in FP8: the decoder's convolutions compute in FP8, for images that are only scored.",
        "Pruned to N after k: after k steps, only the N most extreme candidates continue.",
        "",
        "| model | exploring | explore, s | regenerate, s | baseline, s | speed-up | goal | paper, with FP4 units |",
        "|---|---|---|---|---|---|---|---|",
        *(line for name, one in models.items() for line in _phase(name, one)),
        "",
        *(_setting(name, one) for name, one in models.items()),
        "",
        "## Time of an exploration by part",
        "",
        "Encode: the prompt's text. Later rows of a model repeat the prompt: its encoding and the reward's features",
        "of it are cached, so encode is 0 and reward is shorter. Parts are measured without overlap. The share outside",
        "the transformer is of the whole time, with a new prompt, and with overlapped scoring as in the service.",
        "",
        f"| model | of | whole, s | {' | '.join(f'{part}, s' for part in PARTS)} | outside transformer | goal |",
        "|---|---|---|" + "---|" * (len(PARTS) + 2),
        *(line for name, one in models.items() for line in _share(name, one)),
        "",
        "![Time of an exploration by part](rollout_phase.png)",
    ]
    if "adapter" in result:
        lines += _adapter(result["adapter"])
    return "\n".join(lines) + "\n"


def _phase(name: str, one: Mapping[str, Any]) -> Iterator[str]:
    """A line per exploration plan."""
    times, goals = one.get("phase", {}), GOALS[name]
    if "failed" in one:
        yield f"| {NAMES[name]} | {one['failed']} |"
    if {REGENERATE, BASELINE} - times.keys():
        return
    regenerate, whole = times[REGENERATE]["s"], times[BASELINE]["s"]
    for plan, explore in times.items():
        if plan in (REGENERATE, BASELINE):
            continue
        speed_up = whole / (explore["s"] + regenerate)
        first = plan == UNPRUNED
        wanted = goals.unpruned if plan.removesuffix(FP8) == UNPRUNED else goals.cheaper
        yield (
            f"| {NAMES[name]} {one['setting']['size']}² | {plan} | {explore['s']:.2f} | {regenerate:.2f} "
            f"| {whole:.2f} | {speed_up:.2f} | ≥ {wanted:g} | {goals.paper if first else ''} |"
        )


def _setting(name: str, one: Mapping[str, Any]) -> str:
    setting = one["setting"]
    rounds = len(one["phase"][REGENERATE]["times"]) if REGENERATE in one.get("phase", {}) else 0
    precision, reward = setting["precision"].upper(), setting["reward"]
    timed = "once" if rounds == 1 else f"in {rounds} rounds"
    return (
        f"- {NAMES[name]}: explored in {precision}, scored in {reward}, timed {timed}. "
        f"The baseline has {setting['baseline']}, compiled. {one.get('note', '')}"
    ).rstrip()


def _share(name: str, one: Mapping[str, Any]) -> Iterator[str]:
    for plan, share in one.get("share", {}).items():
        parts = " | ".join(f"{share['parts'][part]:.3f}" for part in PARTS)
        yield (
            f"| {NAMES[name]} | {plan} | {share['served_s']:.2f} | {parts} | {share['outside']['served']:.1%} "
            f"| ≤ {GOALS[name].outside:.0%} |"
        )
    if "regenerate" in one:
        share = one["regenerate"]
        parts = " | ".join(f"{share['parts'][part]:.3f}" for part in PARTS)
        yield f"| | regenerate | {share['served_s']:.2f} | {parts} | {share['outside']['served']:.1%} | |"


def _adapter(one: Mapping[str, Any]) -> list[str]:
    parts = " | ".join(f"{seconds:.3f}" for seconds in one["parts"].values())
    return [
        "",
        "## Adapter update of FLUX.1",
        "",
        f"An adapter of rank 32 ({one['bytes'] / 1e6:.0f} MB), from memory to served:",
        "",
        f"| {' | '.join(one['parts'])} | total | goal |",
        "|---|" + "---|" * (len(one["parts"]) + 1),
        f"| {parts} | {one['whole']:.3f} | ≤ 1.0 |",
        "",
        f"Seconds, medians of 3. {one['modules']} modules are merged in float32 and requantised in place. A chunk of",
        f"one step afterwards compiled {one['recompiled']} graphs.",
    ]


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Plot the parts of explorations without overlap as stacked bars, and their time with overlap as a mark."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    bars = [
        (f"{NAMES[name]}, {plan}", share)
        for name in NAMES
        for plan, share in result["models"].get(name, {}).get("share", {}).items()
    ][::-1]
    if not bars:
        return
    figure, axes = plt.subplots(figsize=(8, 1 + 0.45 * len(bars)), layout="constrained")
    left = [0.0] * len(bars)
    for part in PARTS:
        seconds = [share["parts"][part] for _, share in bars]
        axes.barh([name for name, _ in bars], seconds, left=left, label=part, height=0.6)
        left = [start + more for start, more in zip(left, seconds, strict=True)]
    whole = [share["served_s"] for _, share in bars]
    axes.scatter(whole, range(len(bars)), marker="|", s=260, color="black", label="whole, overlapped", zorder=3)
    axes.set(xlabel="s for 96 candidates")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)
