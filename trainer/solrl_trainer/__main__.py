"""Entry point of `solrl-train` and `python -m solrl_trainer`; handles Ctrl-C from before the other imports."""

from solrl_core.interrupts import end_at_once


def main() -> None:
    """Run the command line."""
    end_at_once("solrl-train: stopped")
    from solrl_trainer import cli

    cli.main()


if __name__ == "__main__":
    main()
