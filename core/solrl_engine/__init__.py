"""Exploration engine: candidates are generated in batches that fit, and scored at the same time.

The rollout service's workers and the trainer use the same engine, so equal devices give equal candidates.
"""
