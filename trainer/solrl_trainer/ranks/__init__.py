"""Ranks of a run, started by torchrun: process group and collectives."""
