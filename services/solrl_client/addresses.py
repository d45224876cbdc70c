"""Addresses of services."""

from urllib.parse import urlsplit


def check_rollout_url(url: str) -> str:
    """Validate the URL of a rollout service, see `check_url`."""
    return check_url(url, "rollout URL", "SOLRL_TOKEN")


def check_url(url: str, what: str, variable: str) -> str:
    """Validate the URL of a service; returns it without a trailing slash.

    Args:
        url: as it was given.
        what: its name in errors.
        variable: variable of the environment for the service's token.

    Raises:
        ValueError: not an http or https URL, or it contains a password, which the message does not show.
    """
    expected = "expected http://HOST:PORT or https://HOST:PORT"
    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError:
        raise ValueError(f"the {what} cannot be read; {expected}") from None
    if parts.username is not None or parts.password is not None:
        raise ValueError(
            f"the {what} contains a user or password; {expected}, and the token in {variable} or {variable}_PATH"
        )
    if parts.query or parts.fragment or "@" in url:
        raise ValueError(f"the {what} contains more than an address; {expected}")
    if parts.scheme not in ("http", "https") or not parts.hostname or not url.isprintable() or port == 0:
        raise ValueError(f"got {what} {url!r}; {expected}")
    return url.strip().rstrip("/")
