"""The trials lie with the benchmark that runs them in full."""

import os
import sys
from pathlib import Path

# Before torch is imported, here and in the processes that the trials start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
