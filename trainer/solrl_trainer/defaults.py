"""Defaults that the help shows, which imports nothing large."""

DEFAULT_PRESET = "mini-sana/sol_rl/clipscore"
