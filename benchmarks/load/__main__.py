"""Load tests of one service: `python benchmarks/load` (or `make load`).

Each row starts real services and clients on loopback and measures everything it compares in one run. Writes
benchmarks/results/load.{json,md}; rows that did not run this time keep their last result.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(Path(__file__).parents[1]))

import scale
from fairness import sharing, sharing_workers, small_beside_big, starving
from lookahead import lookahead
from overload import overload
from pushing import pushing
from soak import soak
from support.targets import Rows, measure

ROWS: Rows = {
    "sharing": lambda short: sharing(2, 10) if short else sharing(8, 40),
    "sharing-workers": lambda short: sharing_workers(12 if short else 120),
    "small": lambda short: small_beside_big(3 if short else 20),
    "starving": lambda short: starving(12 if short else 240),
    "overload": lambda short: overload(96, 5) if short else overload(960, 60),
    "push": lambda short: pushing(),
    "lookahead": lambda short: lookahead(4 if short else 12),
    "scale": lambda short: scale.scale(1, {24: (1, 24), 96: (4, 24)}, (1, 2)) if short else scale.scale(),
    "soak": lambda short: soak(60 if short else 1200),
}
HEAD = (
    "# Load tests of one service",
    "",
    "By `python benchmarks/load`: the miniature SANA, real processes on loopback, clients on the same CPU.",
)

if __name__ == "__main__":
    sys.exit(measure("load", ROWS, __doc__, HEAD))
