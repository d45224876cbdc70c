"""The wire contract between trainer and rollout service: messages, identifiers, problems, noise constants.

This package needs no torch, FastAPI or Redis: any client can install it alone.
"""
