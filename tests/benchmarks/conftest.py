"""Trials use one thread, here and in the processes that they start."""

import os

# Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
