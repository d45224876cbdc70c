"""The token file: tenants and scopes by token. It contains hashes, not tokens.

A token has 256 random bits, so it cannot be guessed from its SHA-256. A slow hash (bcrypt, argon2) protects passwords,
which people choose from a small set; here it would only slow down every request.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field, ValidationError
from solrl_proto.identifiers import Message, RunName
from solrl_proto.secrets import TOKEN_PREFIX
from solrl_proto.text_files import TextFileError, decode_text

logger = logging.getLogger(__name__)

Scope = Literal["rollout", "push", "score", "admin"]
_UNITS = {"h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}

_MOUNTED = "mounted alone, so a change of the file does not arrive; mount its folder instead"


class TokenFileError(ValueError):
    """The token file is missing or invalid; the message says what to do."""


class Token(Message):
    """A token's record, without the token itself."""

    id: Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]
    tenant: RunName
    scopes: Annotated[tuple[Scope, ...], Field(min_length=1)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    created: AwareDatetime
    expires: AwareDatetime | None = None

    @property
    def expired(self) -> bool:
        return self.expires is not None and datetime.now(UTC) >= self.expires


class TokenFile(Message):
    """Content of the token file."""

    version: Literal[1] = 1
    tokens: tuple[Token, ...] = ()


def read_tokens(path: Path) -> tuple[Token, ...]:
    """Read the tokens of a file.

    Raises:
        TokenFileError: the file is missing, not readable, not a regular file, or not a token file.
    """
    return _parse(_read(path), path)


def _read(path: Path) -> bytes:
    try:
        return _read_regular(path)
    except OSError as error:
        create = f"create one with `solrl-rollout token create --tenant NAME --scopes rollout push --file {path}`"
        cure = create if isinstance(error, FileNotFoundError) else "expected a regular file that this user may read"
        raise TokenFileError(f"token file {path}: {error.strerror or error}; {cure}") from error


def _parse(content: bytes, path: Path) -> tuple[Token, ...]:
    try:
        text = decode_text(content, path)
        if text.lstrip().startswith(TOKEN_PREFIX):
            raise TokenFileError(
                f"token file {path}: this is a token, not a file of tokens; leave it to the client, and name the file "
                "that `solrl-rollout token create` wrote"
            )
        return TokenFile.model_validate_json(text).tokens
    except TextFileError as error:
        raise _invalid(path, str(error)) from error
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in fault["loc"])
        raise _invalid(path, f"{where + ': ' if where else ''}{fault['msg']}") from error


def _invalid(path: Path, fault: str) -> TokenFileError:
    return TokenFileError(
        f"token file {path} is not valid: {fault}; "
        f"restore it, or delete it and create new tokens with `solrl-rollout token create --file {path}`"
    )


def create_token(path: Path, tenant: str, scopes: tuple[Scope, ...], lifetime: timedelta | None) -> tuple[str, Token]:
    """Create a token and add it to the file, which is created if necessary.

    Returns:
        The token itself, which is not stored, and its record.

    Raises:
        TokenFileError: the file exists but is invalid.
        ValidationError: the tenant's name is invalid.
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
    _change(path, lambda tokens: (*tokens, token), new=True)
    return secret, token


def revoke_token(path: Path, token_id: str) -> Token:
    """Remove a token from the file; a running service refuses it from the next request on.

    Raises:
        TokenFileError: the file is invalid, or has no such token.
    """
    removed: list[Token] = []

    def without(tokens: tuple[Token, ...]) -> tuple[Token, ...]:
        removed.extend(token for token in tokens if token.id == token_id)
        if not removed:
            ids = ", ".join(token.id for token in tokens) or "none"
            raise TokenFileError(f"got token id {token_id!r}; expected one of: {ids} (`solrl-rollout token list`)")
        return tuple(token for token in tokens if token.id != token_id)

    _change(path, without)
    return removed[0]


def parse_lifetime(text: str) -> timedelta | None:
    """Parse a lifetime such as `30d`, `12h` or `8w`; `never` gives None.

    Raises:
        ValueError: any other text.
    """
    if text == "never":
        return None
    match = re.fullmatch(r"([1-9][0-9]{0,3})([hdw])", text)
    if match is None:
        raise ValueError(f"got --expires {text!r}; expected a number with h, d or w, as 12h, 30d, 8w; or never")
    return int(match[1]) * _UNITS[match[2]]


class TokenStore:
    """Tokens of a file. Each look-up reads it, and parses it if its bytes have changed: a change counts at once."""

    def __init__(self, path: Path) -> None:
        """Read the file; raises TokenFileError if it is missing or invalid."""
        self._path = path
        self._content: bytes | None = None
        self._by_digest: dict[str, Token] = {}
        self._fault: str | None = None
        self._update()

    def find(self, secret: str) -> Token | None:
        """Look up a token, expired or not; None if it is unknown.

        Raises:
            TokenFileError: the file has become invalid, so no token can be checked.
        """
        try:
            self._update()
        except TokenFileError as error:
            if str(error) != self._fault:
                logger.error("all tokens are refused until this is repaired: %s", error)
            self._fault = str(error)
            raise
        self._fault = None
        # The time may depend on the digests: a digest reveals nothing about its token.
        return self._by_digest.get(_digest(secret))

    def tokens(self) -> tuple[Token, ...]:
        """All tokens, expired or not. For the error, see `find`."""
        self._update()
        return tuple(self._by_digest.values())

    def _update(self) -> None:
        content = _read(self._path)
        if content != self._content:
            self._by_digest = {token.sha256: token for token in _parse(content, self._path)}
            self._content = content


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def _read_regular(path: Path) -> bytes:
    """The content of a regular file; opening any other kind, such as a FIFO, could block forever."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError("it is not a regular file")
        if not os.stat(path).st_nlink:  # not of `handle`, whose file may have been replaced just now
            raise OSError(f"it was replaced, and is {_MOUNTED}, and restart the service")
        return file.read()


def _change(path: Path, edit: Callable[[tuple[Token, ...]], tuple[Token, ...]], *, new: bool = False) -> None:
    """Replace the file atomically by one with new tokens, while its folder is locked; a `new` file need not exist."""
    path = path.resolve()  # a link stays one
    try:
        if new:
            path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.parent, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            tokens = edit(() if new and not path.exists() else read_tokens(path))
            _replace(path, json.dumps(TokenFile(tokens=tokens).model_dump(mode="json"), indent=1) + "\n")
        finally:
            os.close(lock)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise TokenFileError(f"token file {path} cannot be replaced: it is {_MOUNTED}") from error
        raise TokenFileError(
            f"token file {path}: {error.strerror or error}; expected a folder in which this user may write; "
            "check --file and the folder's permissions"
        ) from error


def _replace(path: Path, content: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        if os.geteuid() == 0:  # root may create tokens for a service that runs as another user
            owner = (path if path.exists() else path.parent).stat()
            os.chown(handle, owner.st_uid, owner.st_gid)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
