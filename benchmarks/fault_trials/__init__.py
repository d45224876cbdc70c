"""Trials of what must hold when things die: a module a row, each with `run(trials, tell)`.

They lie beside the benchmark that runs them in full, and not with the tests, because they know nothing of pytest:
the tests in tests/benchmarks run the same functions at small counts.
"""
