"""Fault-injection trials: one module per row, each with a function `run(trials, findings)`.

`benchmarks/faults.py` runs them at full counts. The tests in tests/benchmarks run the same functions at short counts.
"""
