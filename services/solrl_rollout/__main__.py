"""`python -m solrl_rollout` is `solrl-rollout`."""

from solrl_rollout.cli import main

main()
