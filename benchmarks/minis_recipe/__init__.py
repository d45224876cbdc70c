"""Training recipe of the shipped miniatures: `PYTHONPATH=benchmarks python -m minis_recipe`."""

from pathlib import Path

LOGS = Path(__file__).parent / "training"
"""Figures of the shipped miniatures' training, by miniature and stage."""
