"""Servers that a command waits for, told to the user."""

import logging
import threading
from datetime import datetime, timedelta

from solrl_client.retries import Wait

from solrl_trainer.run_folder.figures import duration_text

logger = logging.getLogger(__name__)

_NOTED_AFTER = 3.0
"""Seconds of a wait that are not worth a line."""


class Waits:
    """Logs who is waited for and until when, once that takes seconds, and when it is over. It is an `OnWait`.

    Several threads may wait for one server; the wait is over when one of them has an answer.
    """

    def __init__(self) -> None:
        self._until: dict[str, datetime] = {}
        self._noted: dict[str, datetime] = {}
        self._lock = threading.Lock()

    @property
    def now(self) -> tuple[str, datetime] | None:
        """A server that is waited for, and until when; None if there is none."""
        with self._lock:
            return next(iter(self._until.items()), None)

    def __call__(self, server: str, wait: Wait | None) -> None:
        """The server is waited for; None: no longer; nothing left: it was given up, which its error says."""
        now = datetime.now()
        with self._lock:
            if wait is None or not wait.left:
                self._until.pop(server, None)
                began = self._noted.pop(server, None)
                line = began and wait is None and f"waited {duration_text((now - began).total_seconds())} for {server}"
            else:
                self._until[server] = until = now + timedelta(seconds=wait.left)
                line = None
                if wait.waited >= _NOTED_AFTER and server not in self._noted:
                    self._noted[server] = now - timedelta(seconds=wait.waited)
                    line = f"waiting for {server} until {until:%H:%M:%S}: {wait.fault}"
        if line:
            logger.log(logging.WARNING if wait else logging.INFO, line)
