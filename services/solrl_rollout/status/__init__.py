"""The service's state over time: metrics, curves and throughput."""
