"""Comparisons of rewards with their authors' code, for scripts/reward-parity."""
