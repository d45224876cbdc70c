"""Training recipe of the shipped miniatures, which is not in the wheel: `python benchmarks/minis_recipe`."""

from pathlib import Path

LOGS = Path(__file__).parent / "training"
"""Figures of the shipped miniatures' training, by miniature and stage."""
