"""Ranks of a run, started by torchrun: process group, liveness and collectives."""
