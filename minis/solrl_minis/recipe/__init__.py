"""The recipe that made the shipped miniatures. Run it with `python -m solrl_minis.recipe`."""
