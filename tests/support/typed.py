"""Programs run in this process, which saves the imports of a new one."""

import io
import logging
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout

import pytest
from solrl_core.interrupts import unwinding


def typed(program: Callable[[], None], *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a console script; returns its exit code and output, and restores the root logger and SIGINT's handler."""
    out, errors, root, code = io.StringIO(), io.StringIO(), logging.getLogger(), 0
    handlers, level = root.handlers[:], root.level
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(errors), unwinding(signal.SIGINT):
        patch.setattr(sys, "argv", ["program", *arguments])
        for name, value in environment.items():
            patch.setenv(name, value)
        try:
            program()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code, file=errors)
        finally:
            root.handlers[:] = handlers
            root.setLevel(level)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), errors.getvalue())


def accepted(program: Callable[[], None], *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a console script that exits with 0."""
    done = typed(program, *arguments, **environment)
    assert done.returncode == 0, done.stderr + done.stdout
    return done


def refused(program: Callable[[], None], *arguments: str, **environment: str) -> str:
    """What a console script that exits with 2 prints to standard error, without a traceback."""
    done = typed(program, *arguments, **environment)
    assert done.returncode == 2, done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    return done.stderr
