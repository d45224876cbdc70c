"""What the service logs, as lines for people or as JSON for machines, each with the request it belongs to."""

import json
import logging
import sys
import time
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["auto", "json", "text"]

_CONTROL = {i: repr(chr(i))[1:-1] for i in (*range(32), *range(127, 160))}
_request: ContextVar[dict[str, Any] | None] = ContextVar("solrl_request", default=None)


def begin(request_id: str) -> dict[str, Any]:
    """Begin a request: whatever is logged for it from here on carries its id."""
    fields = {"request_id": request_id}
    _request.set(fields)
    return fields


def note(**fields: Any) -> None:
    """Add what became known of the running request (its run, its model) to all that is logged for it.

    Threads and tasks that the request started share it; outside of a request nothing happens.
    """
    known = _request.get()
    if known is not None:
        known.update((name, value) for name, value in fields.items() if value is not None)


def current_request() -> str | None:
    """The running request's id, to be handed to a thread that works for many."""
    known = _request.get()
    return known["request_id"] if known else None


def install(kind: LogFormat) -> None:
    """Send all logging to stderr in one format; `auto` is text on a terminal, else JSON."""
    text = kind == "text" or (kind == "auto" and sys.stderr.isatty())
    handler = logging.StreamHandler()
    handler.setFormatter(TextFormatter() if text else JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = name != "uvicorn.access"  # ours tells more
    logging.getLogger("httpx").setLevel(logging.WARNING)


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line; ASCII, because what a client sent may hold what UTF-8 cannot."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """A line for people: time, level, message, then what else is known as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        """The line; a message never begins another one, so no client can forge a line of the log."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        parts = [f"{clock} {record.levelname.lower():7} {record.getMessage().translate(_CONTROL)}"]
        parts += [f"{name}={json.dumps(value, default=str)}" for name, value in _fields(record).items()]
        line = " ".join(parts)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    own: dict[str, Any] = getattr(record, "fields", {})
    return (_request.get() or {}) | own
