"""Parts of `solrl-train calibrate`: the plans, their measurement in turns, the decision, and the files."""
