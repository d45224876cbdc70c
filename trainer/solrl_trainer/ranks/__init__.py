"""Processes that torchrun started to train one run together: their places, their lines, and their collectives."""
