"""Defaults that the help shows, which imports nothing large."""

DEFAULT_PRESET = "mini-sana/sol_rl/clipscore"
CALIBRATED_STEPS = (2, 3, 4, 6, 8)
CALIBRATED_SCHEDULES = 4
"""Numbers of steps, and the number of fitted solvers, whose plans `calibrate` measures."""
