"""Results table for hostile clients, with one row each from each of SCRIPTS.

Rows that did not run this time keep their last result in docs/results/doors.{json,md}.
"""

import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from solrl_trainer.commands.demo import rollout_service

from support.results import Results, table

MODEL = "mini-sana"
SCRIPTS = ("fuzz_api.py", "oversize.py", "slow_clients.py", "held_bodies.py")


@dataclass(frozen=True)
class Row:
    """Target and result of a script, whether the target was met, and all figures."""

    wanted: str
    found: str
    met: bool
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Service:
    """A running service process and its URL."""

    pid: int
    url: str

    @property
    def port(self) -> int:
        """Port on loopback."""
        return int(self.url.rpartition(":")[2])


@contextmanager
def service(*flags: str) -> Iterator[Service]:
    """Run a service of a miniature on loopback; RuntimeError if it does not become ready or logs a traceback."""
    with tempfile.TemporaryDirectory(prefix="solrl-doors-") as folder:
        log = Path(folder, "log")
        with rollout_service(MODEL, log, flags=flags) as url:
            # The service is the only child of this process.
            yield Service(int(Path(f"/proc/self/task/{os.getpid()}/children").read_text()), url)
        if "Traceback" in log.read_text():
            raise RuntimeError(f"the service logged a traceback:\n{log.read_text()[-5000:]}")


def keep(folder: Path, script: str, row: Row) -> int:
    """Write a script's row to the table; return the script's exit code."""
    results = Results("doors", folder, page)
    results.found[script] = asdict(row) | {"cores": len(os.sched_getaffinity(0)), "date": time.strftime("%Y-%m-%d")}
    results.write()
    results.show()
    print(f"{script}: {row.found}\n{'met' if row.met else 'NOT MET'}: {row.wanted}")
    return 0 if row.met else 1


def page(found: Mapping[str, Any]) -> str:
    """Markdown page."""
    known = [(name, found[name]) for name in SCRIPTS if name in found]
    lines = [
        "# Hostile clients",
        "",
        "A real service with the miniature SANA on loopback. Each row names its script in `benchmarks/`.",
        "",
        *table(
            ("script", "target", "result", "met"),
            ((f"`{name}`", one["wanted"], one["found"], "yes" if one["met"] else "no") for name, one in known),
        ),
    ]
    return "\n".join(lines) + "\n"
