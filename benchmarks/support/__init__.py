"""Helpers of several benchmarks. Helpers that tests share with benchmarks are in `tests.support`."""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[2]))  # for tests.support
