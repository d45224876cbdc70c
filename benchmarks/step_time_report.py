"""Tables and plots of `step_time.py`."""

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

BASELINE = "diffusers bf16 compiled"
ORDER = {name: at for at, name in enumerate((BASELINE, "bf16", "fp8"))}
GOALS = {"flux": (675, 1.6, 1.8), "sd3": (478, 1.4, 1.6), "sana": (155, 1.25, 1.4)}
"""Model → ms that the baseline may take (and 5 %), ratio of FP8 within reach, ratio aimed at."""
NAMES = {"flux": "FLUX.1", "sd3": "SD3.5-L", "sana": "SANA 1.6B"}
CATEGORIES = (
    ("attention", r"flash|fmha|sdpa|attention"),
    ("quantising", r"^_rows|quantiz|transformer_engine|cast_transpose|cast_fp8|cast_only|amax"),
    ("norms and positions", r"rms_norm|layer_norm|layernorm|rsqrt|rope|group_norm"),
    ("convolution", r"^triton_poi_fused_convolution|depthwise|conv2d|convolve|fprop|implicit|cudnn|nchw|nhwc"),
    ("matrix products", r"nvjet|gemm|xmma|cutlass|cublas|splitk|^triton_tem"),
    ("other", r""),
)
"""The first whose pattern is found in a kernel's name is its category."""


def render(rows: Sequence[Row], out: Path) -> str:
    """Write the tables and, where matplotlib is installed, the plots; returns the tables."""
    rows = sorted(rows, key=lambda row: (list(GOALS).index(row["model"]), ORDER.get(row["tier"], len(ORDER))))
    good = [row for row in rows if "ms" in row]
    text = table(rows, good)
    (out / "step_time.md").write_text(text)
    if good and importlib.util.find_spec("matplotlib"):
        plot_steps(good, out / "step_time.png")
        plot_where(good, out / "step_time_where.png")
    return text


def spent(row: Row) -> dict[str, float]:
    """Category → milliseconds of a pass."""
    found = dict.fromkeys((name for name, _ in CATEGORIES), 0.0)
    for kernel, ms in row["kernels"].items():
        low = kernel.lower()
        found[next(name for name, pattern in CATEGORIES if re.search(pattern, low))] += ms
    return found


def table(rows: Sequence[Row], good: Sequence[Row]) -> str:
    """All rows in Markdown."""
    devices = ", ".join(dict.fromkeys(row["device"] for row in good)) or "nothing"
    lines = [
        "# A forward pass by precision",
        "",
        f"By `python benchmarks/step_time.py` on one {devices}: transformers of the true shapes with random weights,",
        "on which time does not depend. Medians of 5 by the GPU's clock, all tiers of a model in turns in one process.",
        f"The ratio is against {BASELINE}: diffusers' own blocks, each compiled, nothing fused.",
        "Compiling: the first pass, for the whole batch, then for a quarter of it. Asking: the host's share of a pass.",
        "",
        "| model | tier | ms | ratio | reach | aim | quarter batch, ms | compiling, s | asking, ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    base = {row["model"]: row["ms"] for row in good if row["tier"] == BASELINE}
    for row in rows:
        model, tier = NAMES[row["model"]], row["tier"]
        if "failed" in row or "ms" not in row:
            why = row.get("failed", "broken off after compiling").replace("|", "/").replace("\n", " ")
            lines.append(f"| {model} | {tier} | not measured: {why} | | | | | | |")
            continue
        most, reach, aim = GOALS[row["model"]]
        ratio = f"{base[row['model']] / row['ms']:.2f}" if row["model"] in base else ""
        goals = (reach, aim) if tier == "fp8" else ("", "")
        if tier == BASELINE:
            goals = (f"≤ {1.05 * most:.0f} ms", f"≤ {most} ms")
        quarter = f"{row['quarter_ms']:.1f}" if "quarter_ms" in row else ""
        compiling = f"{row['compile_s']:.1f}" + (f" + {row['compile_quarter_s']:.1f}" if quarter else "")
        lines.append(
            f"| {model} {row['size']}², batch {row['batch']} | {tier}{'' if row['finite'] else ' (not finite)'} "
            f"| {row['ms']:.1f} | {ratio} | {goals[0]} | {goals[1]} | {quarter} | {compiling} "
            f"| {row['launch_ms']:.1f} |"
        )
    lines += [
        "",
        "![Step time by precision](step_time.png)",
        "",
        "Where the time goes, ms of a pass, from its kernels' names:",
        "",
        f"| model | tier | {' | '.join(name for name, _ in CATEGORIES)} |",
        "|---|---|" + "---|" * len(CATEGORIES),
    ]
    for row in good:
        each = " | ".join(f"{ms:.1f}" for ms in spent(row).values())
        lines.append(f"| {NAMES[row['model']]} | {row['tier']} | {each} |")
    return "\n".join([*lines, "", "![Where the time goes](step_time_where.png)"]) + "\n"


def plot_steps(rows: Sequence[Row], path: Path) -> None:
    """Bars: milliseconds of a pass, a panel a model; the ratio within reach is a line."""
    axes_of, figure = _panels(rows)
    base = {row["model"]: row["ms"] for row in rows if row["tier"] == BASELINE}
    for model, axes in axes_of.items():
        mine = [row for row in rows if row["model"] == model]
        bars = axes.barh([row["tier"] for row in mine], [row["ms"] for row in mine], color="C0")
        ratios = [f" {base[model] / row['ms']:.2f}×" if model in base else "" for row in mine]
        axes.bar_label(bars, [f"{row['ms']:.0f} ms{ratio}" for row, ratio in zip(mine, ratios, strict=True)], padding=3)
        if model in base:
            axes.axvline(base[model] / GOALS[model][1], color="0.5", linestyle="--", label="FP8 within reach")
        axes.margins(x=0.35)
    _save(figure, axes_of, path)


def plot_where(rows: Sequence[Row], path: Path) -> None:
    """Stacked bars: milliseconds of a pass by kind of kernel, a panel a model."""
    axes_of, figure = _panels(rows)
    for model, axes in axes_of.items():
        mine = [row for row in rows if row["model"] == model]
        left = [0.0] * len(mine)
        for name, _ in CATEGORIES:
            part = [spent(row)[name] for row in mine]
            axes.barh([row["tier"] for row in mine], part, left=left, label=name)
            left = [a + b for a, b in zip(left, part, strict=True)]
    _save(figure, axes_of, path)


def _panels(rows: Sequence[Row]) -> tuple[dict[str, Any], Any]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, grid = plt.subplots(len(models), 1, figsize=(8, 2.3 * len(models)), squeeze=False, layout="constrained")
    axes_of = dict(zip(models, grid[:, 0], strict=True))
    for model, axes in axes_of.items():
        one = next(row for row in rows if row["model"] == model)
        axes.set(title=f"{NAMES[model]}, {one['size']}², batch {one['batch']}", xlabel="ms a forward pass")
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    return axes_of, figure


def _save(figure: Any, axes_of: dict[str, Any], path: Path) -> None:
    import matplotlib.pyplot as plt

    last = list(axes_of.values())[-1]
    if last.get_legend_handles_labels()[0]:
        figure.legend(*last.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
