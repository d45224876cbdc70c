"""Bearer tokens of clients, from the environment."""

import os
from pathlib import Path

from solrl_proto.secrets import register_secret
from solrl_proto.text_files import naming, read_text


def bearer_token(variable: str) -> str | None:
    """Bearer token from the file named by `<variable>_PATH`, or from the variable itself; None without either.

    It is never taken from the command line, which other users can read. Surrounding white space is dropped.

    Raises:
        OSError: the file cannot be read.
        ValueError: the content cannot be a token; the message does not show it.
    """
    path = os.environ.get(f"{variable}_PATH")
    source = f"the file of {variable}_PATH ({path})" if path else variable
    with naming(f"{variable}_PATH={path}", "a file with the token, which this user may read"):
        token = (read_text(Path(path)) if path else os.environ.get(variable, "")).strip()
    if path and not token:
        raise ValueError(f"{source} is empty; expected a token")
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise ValueError(
            f"{source} contains white space, control or non-ASCII characters, so it is not a token; "
            "expected one line, as the service's operator gives it"
        )
    return register_secret(token) if token else None
