"""The tables of the page, by name: the arms that each compares, and its figures."""

from collections.abc import Callable, Iterable
from itertools import chain
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

    arms: Callable[[Context], Iterable[Arm]]
    figures: Callable[[Context], dict[str, Any]]
    on_request: bool = False

    def stands(self, context: Context) -> bool:
        """Whether the page has the table."""
        arms = list(self.arms(context))
        return all(arm.complete for arm in arms) if self.on_request else any(arm.runs for arm in arms)


def _values(arms: Callable[[Context], dict[Any, Arm]]) -> Callable[[Context], Iterable[Arm]]:
    return lambda context: arms(context).values()


def _both(pairs: Callable[[Context], dict[Any, gap.Pair]]) -> Callable[[Context], Iterable[Arm]]:
    return lambda context: chain.from_iterable(pairs(context).values())


TABLES = {
    "algorithms": Entry(_values(algorithms.arms), algorithms.figures),
    "families": Entry(_values(families.arms), families.figures),
    "quantised": Entry(_values(quantised.arms), quantised.figures),
    "sweeps": Entry(_values(sweeps.arms), sweeps.figures),
    "gap": Entry(_both(gap.pairs), gap.figures),
    "hacking": Entry(_values(algorithms.arms), algorithms.hacking),
    "plateaus": Entry(_values(plateaus.arms), plateaus.figures, on_request=True),
    "authors": Entry(_values(algorithms.by_authors), algorithms.authors, on_request=True),
    "margin": Entry(_both(gap.seeded), gap.margin, on_request=True),
    "text": Entry(_values(text.arms), text.figures, on_request=True),
    "damaged": Entry(_values(quantised.damaged_arms), quantised.damaged, on_request=True),
    "law": Entry(_values(law.arms), law.figures, on_request=True),
}
