"""Event log of the child processes: a file with one JSON line per event, which survives a kill."""

import json
import os
import time
from pathlib import Path
from typing import Any


class EventLog:
    """Appends events to a file and reads them; safe for several processes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def add(self, event: str, **values: Any) -> None:
        """Append an event; the line is complete even if the process dies right afterwards."""
        line = json.dumps({"event": event, "at": time.monotonic(), **values}).encode() + b"\n"
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(file, line)
        finally:
            os.close(file)

    def events(self, since: int = 0) -> list[dict[str, Any]]:
        """Events after byte `since` of the file."""
        with self.path.open("rb") as file:
            file.seek(since)
            return [json.loads(line) for line in file if line.endswith(b"\n")]

    @property
    def size(self) -> int:
        return self.path.stat().st_size
