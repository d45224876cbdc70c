"""multiprocessing's fork server, forked from the tests' process: what that has imported is not imported again."""

import faulthandler
import os
import select
import sys
from collections.abc import Sequence
from multiprocessing import forkserver, util

import pytest


def fork() -> None:
    """Start the fork server from this process as it is now, in which no thread may hold a lock."""
    with pytest.MonkeyPatch.context() as patch:
        start = util.spawnv_passfds

        def forked(path: bytes, words: Sequence[str], files: Sequence[int]) -> int:
            if "multiprocessing.forkserver" not in words[-1]:  # the tracker of resources
                return start(path, words, files)
            pid = os.fork()
            if not pid:
                _serve(words[-1], files)
            return pid

        patch.setattr(util, "spawnv_passfds", forked)
        forkserver.ensure_running()


def _serve(code: str, files: Sequence[int]) -> None:
    """Run multiprocessing's code of the server, with the state of a new interpreter. Does not return."""
    try:
        faulthandler.disable()
        # Not closed: objects of the tests' process that own these numbers may yet close them.
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in {*map(int, os.listdir("/proc/self/fd"))} - {0, 1, 2, nothing, *files}:
            os.dup2(nothing, number, inheritable=False)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", 1, closefd=False)
        forkserver._forkserver.__init__()  # type: ignore[misc]  # its lock is held
        select.select(files, [], [])  # modules that are missing are imported for the first program
        exec(code)
    finally:
        os._exit(1)
