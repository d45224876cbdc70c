"""Training recipe of the shipped miniatures. Run it with `python -m solrl_minis.recipe`."""
