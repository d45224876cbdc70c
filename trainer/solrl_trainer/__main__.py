"""Entry point of `solrl-train` and `python -m solrl_trainer`; handles Ctrl-C from before the other imports."""

from solrl_core.interrupts import exit_on_interrupt


def main() -> None:
    """Run the command line."""
    exit_on_interrupt("solrl-train: stopped")
    from solrl_core.program import run_program

    from solrl_trainer.commands import cli

    run_program("solrl-train", cli.parse_on_all_ranks, cli.dispatch)


if __name__ == "__main__":
    main()
