"""Objectives: from velocities and advantages to a scalar loss. One file each, found by name (registry.py)."""
