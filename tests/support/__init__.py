"""Programs that tests and benchmarks start, on free ports, and models that they load."""
