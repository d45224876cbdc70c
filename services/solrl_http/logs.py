"""The service's log: text or JSON lines, each with the id of its request, and without secrets of this process."""

import json
import logging
import sys
import time
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

from solrl_proto.secrets import without_secrets

LogFormat = Literal["auto", "json", "text"]

_CONTROL = {i: repr(chr(i))[1:-1] for i in (*range(32), *range(127, 160))}
_request: ContextVar[dict[str, Any] | None] = ContextVar("solrl_request", default=None)
_process: dict[str, Any] = {}
"""Fields of all records of this process."""


def begin_request(request_id: str) -> None:
    """Begin a request: all records logged for it from now on contain its id."""
    _request.set({"request_id": request_id})


def add_fields(**fields: Any) -> None:
    """Add fields, such as run and model, to all further records of the current request; None values are omitted.

    Threads and tasks started by the request share them. Does nothing outside a request.
    """
    context = _request.get()
    if context is not None:
        context.update((name, value) for name, value in fields.items() if value is not None)


def install(kind: LogFormat, **fields: Any) -> None:
    """Send all logging to stderr in one format; `auto` is text on a terminal, otherwise JSON.

    All records of this process have `fields`, such as `worker`.
    """
    _process.clear()
    _process.update(fields)
    text = kind == "text" or (kind == "auto" and sys.stderr.isatty())
    handler = logging.StreamHandler()
    handler.setFormatter(TextFormatter() if text else JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = name != "uvicorn.access"  # the request log has more fields
    logging.getLogger("httpx").setLevel(logging.WARNING)


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, in ASCII: text from clients may contain lone surrogates, which UTF-8 cannot encode."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": without_secrets(record.getMessage()),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = without_secrets(self.formatException(record.exc_info))
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """A readable line: time, level and message, then the fields as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line. Control characters are escaped, so that no client can forge a line of the log."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        parts = [f"{clock} {record.levelname.lower():7} {without_secrets(record.getMessage()).translate(_CONTROL)}"]
        parts += [f"{name}={json.dumps(value, default=str)}" for name, value in _fields(record).items()]
        line = " ".join(parts)
        if not record.exc_info:
            return line
        trace = without_secrets(self.formatException(record.exc_info)).splitlines()
        # Indented, so that no text of an exception looks like a line of the log.
        return "\n".join([line, *("  " + part.translate(_CONTROL) for part in trace)])


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    of_record: dict[str, Any] = getattr(record, "fields", {})
    fields: dict[str, Any] = without_secrets(_process | (_request.get() or {}) | of_record)
    return fields
