"""The page of all tables, from finished runs alone."""

import json
import shutil
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path

from support.caveats import PREPARED_FOR_NVFP4, STRICT_ACCURACY

from paper.compute import MEASURED_AS, SOURCES, STORED, costs_of, store_costs
from paper.finished import FINISHED
from paper.stored import ARCHIVE, store
from paper.tables import ON_REQUEST, TABLES, algorithms, hacking, text
from paper.tables.common import Context, Section
from paper.tuning import SEED
from paper.words import draw_finished, images_of


def write_page(context: Context, folder: Path, out: Path, command: str, named: Collection[str] = ()) -> str:
    """Write paper.{json,md}, and grids and an archive of the runs to the folder `paper`; returns the page.

    Args:
        context: the finished runs.
        folder: folder of the runs, which has their images.
        out: output folder.
        command: command line that gives these settings.
        named: tables that the page has even without a finished run.
    """
    copy_grids(context, folder, out)
    draw_words(context, folder, out)
    store(context.runs, folder, out)
    if context.runs:
        store_costs(context.results, out)
    sections = {
        name: found
        for name, module in TABLES.items()
        if (name in named or context.finished(module.experiments(context)))
        and (found := module.section(context)) is not None
    }
    page_text = page(context, sections, command)
    out.mkdir(parents=True, exist_ok=True)
    content = {
        "programme": asdict(context.programme),
        "machines": sorted({run.machine for run in context.runs.values()}),
        "runs": len(context.runs),
        "tables": {name: section.data for name, section in sections.items()},
    }
    (out / "paper.json").write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    (out / "paper.md").write_text(page_text)
    return page_text


def page(context: Context, sections: Mapping[str, Section], command: str) -> str:
    """Markdown of the page.

    Args:
        context: the finished runs.
        sections: the tables, by name.
        command: command line that gives these settings.
    """
    programme = context.programme
    machines = "; ".join(sorted({run.machine for run in context.runs.values()})) or "no machine yet"
    shared = max((run.jobs for run in context.runs.values()), default=1)
    lines = [
        "# The paper's tables on the miniatures",
        "",
        f"By `{command}` on {machines},",
        f"at most {shared} at a time. {_counted(context)}",
        f"A cell without runs, or with fewer than {len(programme.seeds)} training seeds, says so.",
        *([f"`--stored` reads all runs from [their archive]({ARCHIVE})."] if context.runs else []),
        "",
        "Every run is judged on the same held-out prompts and image seeds, by its averaged weights. Intervals are",
        "95 %, over training seeds and prompts: both are random effects of a crossed design, with the variance of a",
        "two-way analysis of variance and Satterthwaite's degrees of freedom. Differences are paired by seed and",
        "prompt. With one seed, an interval is over prompts alone.",
        "",
        *(_of_usual_tables(context) if sections.keys() - ON_REQUEST else []),
        f"Measured on every run: {', '.join(programme.judged_by)}. `verifier_graded` is the verifier's mean grade",
        "between 0 and 1, where `verifier` is 1 only for an image that is right in all.",
    ]
    for section in sections.values():
        lines += ["", f"## {section.title}", "", *section.lines]
    return "\n".join(lines) + "\n"


def _of_usual_tables(context: Context) -> list[str]:
    """Compute and caveats, which tables on request do not need."""
    costs = costs_of(context.programme.shape, context.results)
    used = ", ".join(f"{run_in.upper()} counts as {measured.upper()}" for run_in, measured in MEASURED_AS.items())
    return [
        "Compute is counted in passes of the transformer, weighted by their times at true shapes on one",
        f"{costs.device} ({' and '.join(f'[{name}]({name})' for name in SOURCES)}; {used}).",
        *([f"The iterations of these runs were planned by [these times]({STORED})."] if context.runs else []),
        "Decoding, rewards and evaluations are not counted. Two-stage runs explore in the trainer's process, which",
        "selects the same seeds as a service; with a lag, at a service.",
        "",
        *STRICT_ACCURACY,
        "",
        *PREPARED_FOR_NVFP4,
        "",
    ]


def _counted(context: Context) -> str:
    """Numbers of finished runs by model, with the trials among them."""
    models = Counter(str(run.config.model) for run in context.runs.values())
    trials = sum(run.config.seed == SEED for run in context.runs.values())
    runs = " and ".join(f"{count} of {model}" for model, count in models.most_common())
    return f"Finished: {runs}; {trials} of them are trials of learning rates." if runs else "No run is finished."


def copy_grids(context: Context, folder: Path, out: Path) -> None:
    """Copy the images of the first seed's runs of table 6 beside the page."""
    for name in _shown(context):
        source = folder / FINISHED / f"{name}.png"
        if source.is_file():
            target = out / hacking.grid_path(name)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)


def draw_words(context: Context, folder: Path, out: Path) -> None:
    """Draw the words of the first seed's runs of table 10 beside the page."""
    own = text.on_text(context)
    for name in text.FAMILIES:
        for run in text.runs_of(own, name)[:1]:
            if (source := images_of(run.name, folder)).is_file():
                draw_finished(source, out / text.picture_of(name))


def _shown(context: Context) -> set[str]:
    """Names of the runs whose images the page shows."""
    return {
        runs[0].name
        for reward in context.programme.rewards
        for name in algorithms.ALGORITHMS
        if (runs := algorithms.runs_of(context, name, reward))
    }
