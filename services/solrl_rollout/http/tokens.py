"""The token file: who may ask for what. It holds no token, only what tells one from another.

A token carries 256 random bits, so nobody can guess what its SHA-256 was made from. A slow hash (bcrypt, argon2) is
for passwords, which people choose from a small set; here it would only make every request slow.
"""

import contextlib
import fcntl
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field, ValidationError
from solrl_proto.identifiers import Message, RunName

logger = logging.getLogger(__name__)

TOKEN_PREFIX = "solrl_"
"""Begins every token, so that scanners of source code and logs can find one that leaked."""

Scope = Literal["rollout", "push", "admin"]
_UNITS = {"h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}


class TokenFileError(ValueError):
    """The token file cannot be used; the message says why and what to do."""


class Token(Message):
    """What is known of a token: not the token."""

    id: Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]
    tenant: RunName
    scopes: Annotated[tuple[Scope, ...], Field(min_length=1)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    created: AwareDatetime
    expires: AwareDatetime | None = None

    @property
    def expired(self) -> bool:
        """Whether its time is over."""
        return self.expires is not None and datetime.now(UTC) >= self.expires


class TokenFile(Message):
    """The file's content."""

    version: Literal[1] = 1
    tokens: tuple[Token, ...] = ()


def read_tokens(path: Path) -> tuple[Token, ...]:
    """The tokens of a file.

    Raises:
        TokenFileError: it is missing, not readable, or no token file.
    """
    try:
        return TokenFile.model_validate_json(path.read_bytes()).tokens
    except OSError as error:
        make = f"solrl-rollout token create --tenant NAME --scopes rollout push --file {path}"
        raise TokenFileError(f"token file {path}: {error.strerror or error}; make one with `{make}`") from error
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in fault["loc"])
        raise TokenFileError(
            f"token file {path} is not valid: {where + ': ' if where else ''}{fault['msg']}; "
            f"restore it, or remove it and make new tokens with `solrl-rollout token create --file {path}`"
        ) from error


def create_token(path: Path, tenant: str, scopes: tuple[Scope, ...], lifetime: timedelta | None) -> tuple[str, Token]:
    """Add a token to the file, made if need be. What is returned first is kept nowhere.

    Raises:
        TokenFileError: the file is there but cannot be used.
        ValidationError: the tenant's name is not one.
    """
    secret = TOKEN_PREFIX + secrets.token_urlsafe(32)
    now = datetime.now(UTC).replace(microsecond=0)
    token = Token(
        id=secrets.token_hex(4),
        tenant=tenant,
        scopes=tuple(dict.fromkeys(scopes)),
        sha256=_digest(secret),
        created=now,
        expires=None if lifetime is None else now + lifetime,
    )
    with _changing(path, new=True) as write:
        write((*(read_tokens(path) if path.exists() else ()), token))
    return secret, token


def revoke_token(path: Path, token_id: str) -> Token:
    """Take a token out of the file; a running service notices at the next request.

    Raises:
        TokenFileError: the file cannot be used, or holds no such token.
    """
    with _changing(path) as write:
        tokens = read_tokens(path)
        found = next((token for token in tokens if token.id == token_id), None)
        if found is None:
            known = ", ".join(token.id for token in tokens) or "none"
            raise TokenFileError(f"got token id {token_id!r}; expected one of: {known} (`solrl-rollout token list`)")
        write(tuple(token for token in tokens if token is not found))
    return found


def parse_lifetime(text: str) -> timedelta | None:
    """`30d`, `12h`, `8w`; `never` is None.

    Raises:
        ValueError: it is neither.
    """
    if text == "never":
        return None
    found = re.fullmatch(r"([1-9][0-9]{0,3})([hdw])", text)
    if found is None:
        raise ValueError(f"got --expires {text!r}; expected a number with h, d or w, as 12h, 30d, 8w; or never")
    return int(found[1]) * _UNITS[found[2]]


class Keyring:
    """The tokens of a file that may change while it is used: it is read again when it did."""

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            TokenFileError: it cannot be used.
        """
        self._path = path
        self._seen = _signature(path)
        self._tokens: tuple[Token, ...] | None = read_tokens(path)

    def __len__(self) -> int:
        return len(self._tokens or ())

    def find(self, secret: str) -> Token | None:
        """The token, expired or not; None if there is none like it.

        Raises:
            TokenFileError: the file was good once and is not any more, so nobody can be known.
        """
        self._refresh()
        if self._tokens is None:
            raise TokenFileError(f"token file {self._path} cannot be used")
        digest, found = _digest(secret), None
        for token in self._tokens:  # all of them, so that the time does not tell where in the file a match is
            if hmac.compare_digest(token.sha256, digest):
                found = token
        return found

    def _refresh(self) -> None:
        # Taken before the file is read: what changes meanwhile is read again the next time.
        signature = _signature(self._path)
        if signature == self._seen:
            return
        self._seen = signature
        try:
            self._tokens = read_tokens(self._path)
        except TokenFileError as error:
            self._tokens = None
            logger.error("nobody is let in until this is mended: %s", error)
        else:
            logger.info("token file %s was read again: %d tokens", self._path, len(self._tokens))


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def _signature(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


@contextlib.contextmanager
def _changing(path: Path, *, new: bool = False) -> Iterator[Callable[[tuple[Token, ...]], None]]:
    """Hold others off while the file is read and replaced; what is yielded replaces it at once or not at all."""
    if new:
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock = os.open(path.parent, os.O_RDONLY)
    except OSError as error:
        raise TokenFileError(f"token file {path}: {error.strerror or error}; check the folder's name") from error

    def write(tokens: tuple[Token, ...]) -> None:
        content = json.dumps(TokenFile(tokens=tokens).model_dump(mode="json"), indent=1) + "\n"
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
        try:
            if os.geteuid() == 0:  # root makes tokens for a service that is not root
                owner = (path if path.exists() else path.parent).stat()
                os.chown(handle, owner.st_uid, owner.st_gid)
            with os.fdopen(handle, "w") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise

    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield write
    finally:
        os.close(lock)
