"""The tables of the page, by name: the arms that each compares, and its figures."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from paper.arms import Arm, Context
from paper.tables import algorithms, families, gap, law, plateaus, quantised, sweeps, text


class Entry(NamedTuple):
    """A table.

    Attributes:
        arms: what it compares.
        figures: figures by their names in the page's template.
        on_request: whether its runs are done only if the table is named. The page has it once all of them are finished;
            it has another table from its first run on.
    """

    arms: Callable[[Context], Mapping[Any, Arm]]
    figures: Callable[[Context], dict[str, Any]]
    on_request: bool = False

    def stands(self, context: Context) -> bool:
        """Whether the page has the table."""
        arms = self.arms(context).values()
        return all(arm.complete for arm in arms) if self.on_request else any(arm.runs for arm in arms)


TABLES = {
    "algorithms": Entry(algorithms.arms, algorithms.figures),
    "families": Entry(families.arms, families.figures),
    "quantised": Entry(quantised.arms, quantised.figures),
    "sweeps": Entry(sweeps.arms, sweeps.figures),
    "gap": Entry(gap.arms, gap.figures),
    "hacking": Entry(algorithms.arms, algorithms.hacking),
    "plateaus": Entry(plateaus.arms, plateaus.figures, on_request=True),
    "authors": Entry(algorithms.by_authors, algorithms.authors, on_request=True),
    "margin": Entry(gap.seeded, gap.margin, on_request=True),
    "text": Entry(text.arms, text.figures, on_request=True),
    "damaged": Entry(quantised.damaged_arms, quantised.damaged, on_request=True),
    "law": Entry(law.arms, law.figures, on_request=True),
}
