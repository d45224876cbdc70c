"""Tables and plots of `step_time.py`."""

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

BASELINE = "diffusers bf16 compiled"
ORDER = {name: at for at, name in enumerate((BASELINE, "bf16", "fp8"))}
GOALS: dict[str, tuple[int | None, float, float | None]] = {
    "flux": (675, 1.6, 1.8),
    "sd3": (478, 1.4, 1.6),
    "sana": (155, 1.25, 1.4),
    "sd3-medium": (None, 1.3, None),
    "z-image": (None, 1.3, None),
    "qwen-image": (None, 1.3, None),
    "flux2-klein": (None, 1.3, None),
}
"""Model → (reference time of the baseline in ms, required speed-up of FP8, goal for the speed-up of FP8)."""
NAMES = {
    **{"flux": "FLUX.1", "sd3": "SD3.5-L", "sana": "SANA 1.6B", "sd3-medium": "SD3.5-M", "z-image": "Z-Image"},
    **{"qwen-image": "Qwen-Image", "flux2-klein": "FLUX.2 [klein] 4B"},
}
CATEGORIES = (
    ("attention", r"flash|fmha|sdpa|attention"),
    ("quantising", r"^_(packed_)?rows|quantiz|transformer_engine|cast_transpose|cast_fp8|cast_only|amax"),
    ("norms and positions", r"rms_norm|layer_norm|layernorm|rsqrt|rope|group_norm"),
    ("convolution", r"^triton_poi_fused_convolution|depthwise|conv2d|convolve|fprop|implicit|cudnn|nchw|nhwc"),
    ("matrix products", r"nvjet|gemm|xmma|cutlass|cublas|splitk|^triton_tem"),
    ("other", r""),
)
"""(category, pattern). A kernel belongs to the first category whose pattern occurs in its name."""


def render(rows: Sequence[Row], out: Path) -> str:
    """Write the tables and, if matplotlib is installed, the plots; return the tables."""
    rows = sorted(rows, key=lambda row: (list(GOALS).index(row["model"]), ORDER.get(row["tier"], len(ORDER))))
    good = [row for row in rows if "ms" in row]
    text = table(rows, good)
    (out / "step_time.md").write_text(text)
    if good and importlib.util.find_spec("matplotlib"):
        plot_steps(good, out / "step_time.png")
        plot_where(good, out / "step_time_where.png")
    return text


def spent(row: Row) -> dict[str, float]:
    """Milliseconds of a pass by category of kernel."""
    found = dict.fromkeys((name for name, _ in CATEGORIES), 0.0)
    for kernel, ms in row["kernels"].items():
        low = kernel.lower()
        found[next(name for name, pattern in CATEGORIES if re.search(pattern, low))] += ms
    return found


def table(rows: Sequence[Row], good: Sequence[Row]) -> str:
    """Markdown tables of all rows."""
    devices = ", ".join(dict.fromkeys(row["device"] for row in good)) or "nothing"
    lines = [
        "# Forward pass by precision",
        "",
        f"By `python benchmarks/step_time.py` on one {devices}: transformers at true size with random weights; time",
        "does not depend on the weights. Medians of 5 by CUDA events; the precisions of a model are interleaved in one",
        f"process. Speed-ups are relative to {BASELINE}: diffusers' own blocks, each compiled, without fusion.",
        "Compile: time of the first pass at the full batch, then at a quarter of it; empty where another process had",
        "compiled. Launch: CPU time per pass.",
        "",
        "| model | precision | ms | speed-up | required | goal | quarter batch, ms | compile, s | launch, ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    base = {row["model"]: row["ms"] for row in good if row["tier"] == BASELINE}
    for row in rows:
        model, tier = NAMES[row["model"]], row["tier"]
        if "failed" in row or "ms" not in row:
            why = row.get("failed", "ended after compiling").replace("|", "/").replace("\n", " ")
            lines.append(f"| {model} | {tier} | not measured: {why} | | | | | | |")
            continue
        most, reach, aim = GOALS[row["model"]]
        ratio = f"{base[row['model']] / row['ms']:.2f}" if row["model"] in base else ""
        goals = (f"{reach}", f"{aim or ''}") if tier == "fp8" else ("", "")
        if tier == BASELINE and most is not None:
            goals = (f"≤ {1.05 * most:.0f} ms", f"≤ {most} ms")
        quarter = f"{row['quarter_ms']:.1f}" if "quarter_ms" in row else ""
        times = [row[key] for key in ("compile_s", "compile_quarter_s") if key in row]
        compiling = " + ".join(f"{seconds:.1f}" for seconds in times)
        lines.append(
            f"| {model} {row['size']}², batch {row['batch']} | {tier}{'' if row['finite'] else ' (not finite)'} "
            f"| {row['ms']:.1f} | {ratio} | {goals[0]} | {goals[1]} | {quarter} | {compiling} "
            f"| {row['launch_ms']:.1f} |"
        )
    lines += [
        "",
        "![Step time by precision](step_time.png)",
        "",
        "Milliseconds of a pass by kind of kernel, classified by the kernels' names:",
        "",
        f"| model | precision | {' | '.join(name for name, _ in CATEGORIES)} |",
        "|---|---|" + "---|" * len(CATEGORIES),
    ]
    for row in good:
        each = " | ".join(f"{ms:.1f}" for ms in spent(row).values())
        lines.append(f"| {NAMES[row['model']]} | {row['tier']} | {each} |")
    return "\n".join([*lines, "", "![Step time by kind of kernel](step_time_where.png)"]) + "\n"


def plot_steps(rows: Sequence[Row], path: Path) -> None:
    """Bar plot of milliseconds per pass, one panel per model; a line marks the required speed-up."""
    axes_of, figure = _panels(rows)
    base = {row["model"]: row["ms"] for row in rows if row["tier"] == BASELINE}
    for model, axes in axes_of.items():
        mine = [row for row in rows if row["model"] == model]
        bars = axes.barh([row["tier"] for row in mine], [row["ms"] for row in mine], color="C0")
        ratios = [f", {base[model] / row['ms']:.2f}×" if model in base else "" for row in mine]
        labels = [f"{row['ms']:.0f} ms{ratio}" for row, ratio in zip(mine, ratios, strict=True)]
        # Within the bars, where the line does not cross them.
        axes.bar_label(bars, labels, label_type="center", color="white")
        if model in base:
            axes.axvline(base[model] / GOALS[model][1], color="0.5", linestyle="--", label="required of FP8")
    _save(figure, axes_of, path)


def plot_where(rows: Sequence[Row], path: Path) -> None:
    """Stacked bars of milliseconds per pass by kind of kernel, one panel per model."""
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
        axes.set(title=f"{NAMES[model]}, {one['size']}², batch {one['batch']}", xlabel="ms per forward pass")
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
