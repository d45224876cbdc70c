"""Comparison of each algorithm with its public code, one module per algorithm; run by `python benchmarks/parity`.

A module `NAME.py` has `REPOSITORY`, `CASES`, and `ours(case)` and `theirs(published, case)` for the settings of a case:
the same names → tensors, on fixed inputs, computed by this project and by a clone of the public code.
"""
