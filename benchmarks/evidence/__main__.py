"""The pages of evidence, docs/findings.md and docs/evidence: templates whose figures come from stored results.

`python benchmarks/evidence` fills the templates beside this file from the JSON files in benchmarks/results, and draws
the pages' pictures.
"""

import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from evidence.claims import figures
from evidence.formats import FILTERS
from evidence.pictures import PICTURES
from paper import published
from paper.figures import templates
from solrl_trainer.commands.demo_words import HANDICAP

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
PAGES = {
    "findings.md": Path("docs/findings.md"),
    **{
        name: Path("docs/evidence") / name
        for name in ("ranking.md", "training.md", "speed.md", "service.md", "unproven.md")
    },
}
"""Template → page."""


def main() -> None:
    """Write the pages and their pictures."""
    for page, text in pages(RESULTS).items():
        (ROOT / page).parent.mkdir(exist_ok=True)
        (ROOT / page).write_text(text, encoding="utf-8")
        print(page)
    for name, draw in PICTURES.items():
        draw(partial(read, RESULTS), ROOT / "docs/evidence" / name)


def pages(results: Path) -> dict[Path, str]:
    """Page → its text, from the results in a folder.

    Raises:
        jinja2.UndefinedError: a template names a figure that there is not.
        KeyError: a result lacks a figure.
    """
    environment = templates(Path(__file__).parent)
    environment.filters |= {one.__name__: one for one in FILTERS}
    own = partial(read, results)
    paper = own("paper")
    named = {
        "read": own,
        "handicap": HANDICAP,
        "published": published,
        "programme": paper["programme"],
        **paper["tables"],
        **figures(own),
    }
    texts = {page: environment.get_template(name).render(named) for name, page in PAGES.items()}
    return {page: re.sub(r"[+−](0\.0+)\b", r"\1", text) for page, text in texts.items()}


def read(results: Path, name: str) -> Any:
    """Content of a stored result."""
    return json.loads((results / f"{name}.json").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
