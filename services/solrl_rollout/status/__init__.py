"""The service's own state: metrics, logs, curves and the data of the status page."""
