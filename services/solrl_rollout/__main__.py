"""Entry point of `solrl-rollout` and `python -m solrl_rollout`; handles Ctrl-C from before the other imports."""

from solrl_core.interrupts import end_at_once


def main() -> None:
    """Run the command line."""
    end_at_once("solrl-rollout: stopped")
    from solrl_rollout import cli

    cli.main()


if __name__ == "__main__":
    main()
