"""Programs that benchmarks and tests run for themselves: a Redis, a browser, and ports to run them on."""
