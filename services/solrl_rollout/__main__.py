"""Entry point of `solrl-rollout` and `python -m solrl_rollout`; handles Ctrl-C from before the other imports."""

from solrl_core.interrupts import exit_on_interrupt


def main() -> None:
    exit_on_interrupt("solrl-rollout: stopped")
    from solrl_core.program import run_program

    from solrl_rollout import cli

    run_program(cli.PROGRAM, cli.parse, cli.dispatch)


if __name__ == "__main__":
    main()
