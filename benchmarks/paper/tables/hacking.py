"""Table 6: rewards that were not trained and the judges, beside the trained one, for each algorithm."""

from collections.abc import Mapping

from support.results import table

from paper.experiments import Experiment
from paper.intervals import Estimate
from paper.tables import algorithms
from paper.tables.common import NOT_RUN, Context, Section, as_json, gain, signed

TITLE = "6. Reward hacking"


def experiments(context: Context, *, whole: bool = False) -> list[Experiment]:
    """The runs of table 1."""
    return algorithms.experiments(context, whole=whole)


def section(context: Context) -> Section:
    """The table."""
    programme = context.programme
    rows, data = [], {}
    for reward in programme.rewards:
        for name in algorithms.ALGORITHMS:
            runs = algorithms.runs_of(context, name, reward) or []
            found = {judge: gain(context, runs, judge) for judge in programme.judged_by}
            cells = [f"**{signed(one)}**" if one and judge == reward else signed(one) for judge, one in found.items()]
            grid = f"[grid]({grid_path(runs[0].name)})" if runs and context.finished(runs[:1]) else ""
            rows.append([reward, name, *cells, _fell(found, reward), grid])
            data[f"{reward}, {name}"] = {judge: as_json(one) for judge, one in found.items()}
    lines = [
        "Gains of every reward in standard deviations of the base within a prompt, the trained one in bold. Fell:",
        "judges and untrained rewards whose whole interval lies below 0 although the trained reward rose.",
        "",
        *table(["trained on", "algorithm", *programme.judged_by, "fell", "grid"], rows),
    ]
    return Section(TITLE, lines, {"gains": data})


def grid_path(name: str) -> str:
    """Path of a run's images, from the page."""
    return f"paper/{name}.png"


def _fell(found: Mapping[str, Estimate | None], reward: str) -> str:
    trained = found[reward]
    if trained is None:
        return NOT_RUN
    fell = [judge for judge, one in found.items() if judge != reward and one and one.high < 0 < trained.low]
    return ", ".join(fell) or "none"
