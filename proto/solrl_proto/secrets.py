"""Secrets that this process holds, and texts without them.

Another program may repeat a request's head in its answer, and an answer's text may reach a client or a log. `Problem`,
the formatters of logs and `printable` therefore cut out every secret.
"""

import html
import json
import os
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from solrl_proto.text_files import read_text

TOKEN_PREFIX = "solrl_"
"""Prefix of every token of a service, so that scanners of source code and logs can find leaked ones."""

CUT = "[secret]"
"""Replaces a secret in a text."""

_SHORTEST = 4
"""Characters of a secret; a shorter one protects nothing, and occurs in many words."""
_SERVICE_TOKEN = rf"{TOKEN_PREFIX}[A-Za-z0-9_-]{{43}}"
_HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")

_held: frozenset[str] = frozenset()


def register_secret(secret: str) -> str:
    """Have `without_secrets` cut this secret out from now on; returns it."""
    global _held
    _held |= {secret}
    return secret


def without_secrets(value: Any) -> Any:
    """A text without the secrets that this process holds, also where they are escaped; or a JSON value of such texts.

    Secrets are what `register_secret` registered, the token of the Hugging Face hub, and texts like a service's token.
    """
    return changed_texts(value, lambda text: _pattern(_held | _of_the_hub()).sub(CUT, text))


def changed_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with each of its texts and names changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {changed_texts(key, change): changed_texts(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [changed_texts(item, change) for item in value]
    return value


def _of_the_hub() -> frozenset[str]:
    """The token of huggingface_hub."""
    tokens = [os.environ.get(name, "") for name in _HUB_TOKENS]
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return frozenset(map(str.strip, [*tokens, _content(os.environ.get("HF_TOKEN_PATH") or str(Path(home, "token")))]))


@lru_cache
def _content(path: str) -> str:
    try:
        return read_text(Path(path).expanduser())
    except (OSError, ValueError, RuntimeError):  # the last: no home
        return ""


@lru_cache
def _pattern(secrets: frozenset[str]) -> re.Pattern[str]:
    """Matches each secret as it is, and as JSON, HTML, an address or Python's repr show it; the longest first."""
    forms = {
        form
        for secret in secrets
        if len(secret) >= _SHORTEST
        for form in (secret, json.dumps(secret)[1:-1], html.escape(secret), quote(secret, safe=""), repr(secret)[1:-1])
    }
    return re.compile("|".join([_SERVICE_TOKEN, *map(re.escape, sorted(forms, key=len, reverse=True))]))
