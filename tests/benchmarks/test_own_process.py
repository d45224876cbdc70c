"""Rows of work in a process of its own. `device` only decides whether there is one."""

import os
import time

import pytest
from support.own_process import ProcessEndedError, rows_of

pytestmark = pytest.mark.slow


def test_the_variables_are_those_of_the_process_alone() -> None:
    letters = rows_of(os.path.expandvars, "$OF_THE_WORK", device="cuda", environment={"OF_THE_WORK": "yes"})
    assert list(letters) == ["y", "e", "s"]
    assert "OF_THE_WORK" not in os.environ


def test_a_failure_is_an_error() -> None:
    with pytest.raises(ProcessEndedError, match="ended with 1"):
        list(rows_of(int, "x", device="cuda"))


def test_a_process_ends_at_its_limit() -> None:
    with pytest.raises(ProcessEndedError, match="ended with -9"):
        list(rows_of(time.sleep, 3600, device="cuda", limit=0.1))
