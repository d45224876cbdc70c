"""Exploration engine: candidates generated in batches that fit, scored meanwhile, and pruned as a group.

The rollout service's workers and the trainer use the same engine, so equal devices give equal candidates.
"""
