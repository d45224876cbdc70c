"""Start of all programs: `--version`, one line for each error, and exit codes."""

import logging
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import TypeVar

from solrl_proto.printable import PrintableFormatter, error_text, print_error
from solrl_proto.text_files import start_in_utf8

from solrl_core.interrupts import INTERRUPTED

CommandT = TypeVar("CommandT")


def run_program(program: str, parse: Callable[[list[str]], CommandT], run: Callable[[CommandT], int]) -> None:
    """Run the command that the command line gives. Exits with its code, or with 2 and the reason why it failed.

    Args:
        program: the program's name.
        parse: words → command; exits with 2, or raises, if the words are invalid.
        run: runs the command; returns the exit code.
    """
    # Set before torch is imported. Otherwise OpenMP's threads spin after each operation, and on a small machine
    # service and trainer compete for cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    start_in_utf8()
    words = sys.argv[1:]
    if words == ["--version"]:
        print(f"{program} {version('solrl')}")
        return
    if logging.lastResort is not None:  # prints warnings and the tracebacks of rewards
        logging.lastResort.setFormatter(PrintableFormatter())
    try:
        sys.exit(run(parse(words)))
    except KeyboardInterrupt:
        print(f"{program}: stopped", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except Exception as error:
        if os.environ.get("SOLRL_TRACEBACK"):
            raise
        print_error(program, "\n".join([error_text(error), *getattr(error, "__notes__", ())]))
        sys.exit(2)
