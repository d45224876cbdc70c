"""Compression of answers for clients that accept it."""

from fastapi import Request


def accepts_gzip(request: Request) -> bool:
    """Whether the client accepts gzip, by Accept-Encoding of RFC 9110."""
    for one in request.headers.get("accept-encoding", "").split(","):
        coding, _, parameters = one.partition(";")
        if coding.strip().lower() == "gzip":
            weight = parameters.strip().removeprefix("q=")
            return not weight or weight.strip("0.") != ""
    return False
