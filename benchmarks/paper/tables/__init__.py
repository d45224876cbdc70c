"""The tables of the page, by name. Each module has `TITLE`, `experiments(context)` and `section(context)`."""

from types import ModuleType

from paper.tables import (
    algorithms,
    authors,
    damaged,
    families,
    gap,
    hacking,
    law,
    margin,
    plateaus,
    quantised,
    sweeps,
    text,
)

ON_REQUEST = ("plateaus", "authors", "margin", "text", "damaged", "law")
"""Tables whose runs are done only if the table is named, and which the page has once some are finished."""
TABLES: dict[str, ModuleType] = {
    "algorithms": algorithms,
    "families": families,
    "quantised": quantised,
    "sweeps": sweeps,
    "gap": gap,
    "hacking": hacking,
    "plateaus": plateaus,
    "authors": authors,
    "margin": margin,
    "text": text,
    "damaged": damaged,
    "law": law,
}
