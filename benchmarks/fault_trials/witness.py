"""What processes really did, a JSON line an event, in a file that outlives them."""

import json
import os
import time
from pathlib import Path
from typing import Any


class Witness:
    """Appends to a file and reads it; any number of processes may."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def note(self, event: str, **values: Any) -> None:
        """Append an event; the line is whole even if the process dies right after."""
        line = json.dumps({"event": event, "at": time.monotonic(), **values}).encode() + b"\n"
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(file, line)
        finally:
            os.close(file)

    def events(self, since: int = 0) -> list[dict[str, Any]]:
        """The events after byte `since` of the file."""
        with self.path.open("rb") as file:
            file.seek(since)
            return [json.loads(line) for line in file if line.endswith(b"\n")]

    @property
    def size(self) -> int:
        """Where the file ends now."""
        return self.path.stat().st_size
