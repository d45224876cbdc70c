"""Layouts with a service against one without, by arithmetic: `python benchmarks/fast/layouts.py`.

Prints the table of docs/many-gpus.md: the speed of a run whose candidates a service explores one version ahead, beside
the same run on as many GPUs that do everything. Seconds of a prompt come from `cost.py`; prompts divide evenly among
the GPUs, and the push and the first iteration do not count.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from solrl_trainer.settings.presets import resolve
from support.results import table

from fast.cost import SHAPES, seconds_of_prompt

LAYOUTS = ((1, 1), (2, 3), (1, 2), (1, 3), (2, 6))
"""GPUs of the service, and of the trainer."""
SETTINGS = ("explore.precision=fp8", "explore.steps=4")
"""Four steps, which a calibration has fitted."""


def speeds(seconds: Mapping[str, float], serving: int, training: int) -> tuple[float, float]:
    """Speed of a layout, relative to as many GPUs that do everything, and the share that its service explores at best.

    A share below 1 gives a speed of 1.

    Args:
        seconds: of one prompt on one GPU, by phase.
        serving: GPUs of the service.
        training: GPUs that train.

    Returns:
        Speed if the service explores every prompt, and the best share.
    """
    explore, total = seconds["explore"], sum(seconds.values())
    alone = total / (serving + training)
    plain = max(explore / serving, (total - explore) / training)
    return alone / plain, min(1.0, alone * serving / explore)


def layouts() -> str:
    """The table in Markdown: a speed, or the `explore.share` that gives 1; equal layouts share a row."""
    prompts = {
        shape: seconds_of_prompt(resolve(f"{model}/fast/clipscore", overrides=SETTINGS).config, shape)
        for shape, model in zip(SHAPES, ("flux1", "sd3", "sana"), strict=True)
    }
    rows: dict[tuple[str, ...], list[str]] = {}
    for serving, training in LAYOUTS:
        cells = []
        for seconds in prompts.values():
            plain, share = speeds(seconds, serving, training)
            cells.append(f"1, share {share:.2f}" if share < 1 else f"{plain:.2f}")
        rows.setdefault(tuple(cells), []).append(f"{serving} + {training}")
    heads = ("GPUs that serve + train", *SHAPES.values())
    return "\n".join(table(heads, ((", ".join(names), *cells) for cells, names in rows.items())))


if __name__ == "__main__":
    print(layouts())
