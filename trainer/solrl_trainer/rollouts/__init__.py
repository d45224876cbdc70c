"""Rollouts of an iteration: candidates are explored (at a service or locally), selected, regenerated and scored."""
