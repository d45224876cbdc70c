"""Experiment trackers: copies of a run's figures, settings, sample images and report."""
