"""`python -m solrl_trainer` is `solrl-train`."""

from solrl_trainer.cli import main

main()
