"""The tables of the page, by name. Each module has `TITLE`, `experiments(context)` and `section(context)`."""

from types import ModuleType

from paper.tables import algorithms, families, gap, hacking, quantised, sweeps

TABLES: dict[str, ModuleType] = {
    "algorithms": algorithms,
    "families": families,
    "quantised": quantised,
    "sweeps": sweeps,
    "gap": gap,
    "hacking": hacking,
}
