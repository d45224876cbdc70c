"""Defaults that the help shows, which imports nothing large."""

DEFAULT_PRESET = "mini-sana/sol_rl/clipscore"
CALIBRATED_STEPS = (2, 3, 4, 6, 8)
CALIBRATED_SCHEDULES = 4
"""Numbers of steps, and the number of fitted solvers, whose plans `calibrate` measures."""
FIRST_SETTINGS = (
    *("model", "prompts", "rewards", "iterations", "seed", "rollout_url"),
    *("explore.prompts", "explore.candidates", "explore.keep", "explore.steps", "regenerate.steps"),
    *("lora.rank", "optimizer.learning_rate", "optimizer.batch", "evaluate.every"),
)
"""Settings of a run to know first; the page of settings and a dry run begin with them."""
