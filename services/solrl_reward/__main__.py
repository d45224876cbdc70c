"""Entry point of `solrl-reward` and `python -m solrl_reward`; handles Ctrl-C from before the other imports."""

from solrl_core.interrupts import exit_on_interrupt


def main() -> None:
    """Run the command line."""
    exit_on_interrupt("solrl-reward: stopped")
    from solrl_reward import cli

    cli.main()


if __name__ == "__main__":
    main()
