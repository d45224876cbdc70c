"""Layouts of a run on several GPUs: who explores, regenerates and trains, and what it takes."""
