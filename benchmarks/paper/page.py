"""The page of all tables, from finished runs alone: `page.md`, whose figures and tables come from `paper.tables`."""

import json
import shutil
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from support import caveats
from support.results import table

from paper import compute, published, tables, tuning
from paper.arms import Context
from paper.figures import as_json, templates
from paper.finished import ARCHIVE, file_of, store
from paper.tables import TABLES, algorithms, text
from paper.words import WORDS, draw


def write_page(context: Context, folder: Path, out: Path, command: str) -> str:
    """Write paper.{json,md}, and pictures and an archive of the runs to the folder `paper`; returns the page.

    Args:
        context: the finished runs.
        folder: folder of the runs, which has their images.
        out: output folder.
        command: command line that gives these settings.
    """
    copy_grids(context, folder, out)
    draw_words(context, folder, out)
    store(context.runs, folder, out)
    compute.store_costs(out)
    found = {name: one.figures(context) for name, one in TABLES.items() if one.stands(context)}
    said = page(context, found, command)
    content = {"programme": asdict(context.programme), "runs": len(context.runs), "tables": found}
    (out / "paper.json").write_text(json.dumps(content, indent=1, allow_nan=False, default=as_json) + "\n")
    (out / "paper.md").write_text(said)
    return said


def page(context: Context, found: dict[str, dict[str, Any]], command: str) -> str:
    """Markdown of the page.

    Args:
        context: the finished runs.
        found: figures by table.
        command: command line that gives these settings.
    """
    runs, choice = context.runs.values(), context.choice()
    template = templates(Path(__file__).parent).get_template("page.md")
    return template.render(
        dict.fromkeys(TABLES),
        **found,
        programme=context.programme,
        command=command,
        machines="; ".join(sorted({run.machine for run in runs})),
        jobs=max((run.jobs for run in runs), default=1),
        models=Counter(str(run.config.model) for run in runs).most_common(),
        trials=sum(run.config.seed == tuning.SEED for run in runs),
        usual_rate=choice and choice.rate,
        ceiling=context.ceilings,
        device=compute.costs_of(compute.SHAPE)["device"],
        compute=compute,
        archive=ARCHIVE,
        caveats=caveats,
        published=published,
        tuning=tuning,
        of=tables,
        table=table,
    )


def copy_grids(context: Context, folder: Path, out: Path) -> None:
    """Copy the images of the first seed's runs of table 6 beside the page."""
    for arm in algorithms.arms(context).values():
        source, target = file_of(arm.experiments[0].name, folder, "png"), out / algorithms.grid_path(arm)
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)


def draw_words(context: Context, folder: Path, out: Path) -> None:
    """Draw the words of the first seed's runs of table 10 beside the page."""
    for (variant, name), arm in text.arms(context).items():
        source = file_of(arm.experiments[0].name, folder, WORDS)
        if not variant and arm.runs and source.is_file():
            draw(arm.runs[0].prompts, source, out / text.picture_of(name))
