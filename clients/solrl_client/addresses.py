"""Addresses of services."""

from urllib.parse import urlsplit

_EXPECTED = "expected http://HOST:PORT or https://HOST:PORT"
_PORTS = {"http": 80, "https": 443}


def check_rollout_url(url: str) -> str:
    """Validate the URL of a rollout service, see `check_url`."""
    return check_url(url, "rollout URL", "SOLRL_TOKEN")


def origin(url: str, what: str) -> str:
    """Scheme, host and port of a service's URL in one spelling, such as http://127.0.0.1:8100; `what` is for errors.

    Raises:
        ValueError: not an http or https URL of a host and a port alone.
    """
    parts = urlsplit(check_url(url, what))
    if parts.path:
        raise ValueError(f"the {what} contains the path {parts.path!r}; {_EXPECTED}")
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}:{parts.port or _PORTS[parts.scheme]}"


def check_url(url: str, what: str, variable: str | None = None) -> str:
    """Validate the URL of a service; returns it without a trailing slash.

    Args:
        url: as it was given.
        what: its name in errors.
        variable: variable of the environment for the service's token, if it may have one.

    Raises:
        ValueError: not an http or https URL, or it contains a password, which the message does not show.
    """
    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError:
        raise ValueError(f"the {what} cannot be read; {_EXPECTED}") from None
    if parts.username is not None or parts.password is not None:
        advice = f", and the token in {variable} or {variable}_PATH" if variable else ""
        raise ValueError(f"the {what} contains a user or password; {_EXPECTED}{advice}")
    if any(sign in url for sign in "?#@"):
        raise ValueError(f"the {what} contains more than an address; {_EXPECTED}")
    if parts.scheme not in ("http", "https") or not parts.hostname or not url.isprintable() or port == 0:
        raise ValueError(f"got {what} {url!r}; {_EXPECTED}")
    return url.strip().rstrip("/")
