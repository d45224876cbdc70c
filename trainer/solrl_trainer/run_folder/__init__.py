"""The folder of a run: what each file is, and how a run is continued from it."""
