"""Fault-injection trials: one module per row, each with a function `run(trials, findings)`.

`benchmarks/faults.py` runs them at full counts. The tests in benchmarks/tests run the same functions at short counts.
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[2]))  # for tests.support
