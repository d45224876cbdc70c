"""Programs that benchmarks and tests start: Redis and a browser, on free ports."""
