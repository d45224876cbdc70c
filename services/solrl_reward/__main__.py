"""Entry point of `solrl-reward` and `python -m solrl_reward`; handles Ctrl-C from before the other imports."""

from solrl_core.interrupts import exit_on_interrupt


def main() -> None:
    exit_on_interrupt("solrl-reward: stopped")
    from solrl_core.program import run_program

    from solrl_reward import cli

    run_program(cli.PROGRAM, cli.parse, cli.dispatch)


if __name__ == "__main__":
    main()
