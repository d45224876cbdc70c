"""Exploration engine: candidates generated in batches that fit, scored meanwhile, and the choice of survivors.

The rollout service's workers and the trainer use the same engine, so equal devices give equal candidates.
"""
