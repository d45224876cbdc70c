"""Prompt sets of a run: registered ones, folders and files, their rewards, and stored images."""
