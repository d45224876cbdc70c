"""Findings of `doctor` about what the services share: access and port."""

from collections.abc import Iterator
from typing import Literal

from solrl_proto.problems import ProblemError

from solrl_http.serving import bind, check_exposure
from solrl_http.settings import HttpSettings
from solrl_http.tokens import TokenFileError, read_tokens

Row = tuple[str, Literal["ok", "warn", "missing"], str, str]
"""Subject, state, finding and remedy."""


def access_rows(settings: HttpSettings) -> Iterator[Row]:
    """Who may use a service."""
    path = settings.token_file
    if path is None:
        try:
            check_exposure(settings)
        except ProblemError as error:
            yield ("access", "missing", error.problem.detail, error.problem.action or "")
        else:
            if settings.allow_anonymous:
                yield ("access", "warn", "no tokens: anyone who can reach the address can do anything", "--token-file")
            else:
                yield ("access", "ok", "no tokens: this machine alone is served", "")
        return
    try:
        tokens = read_tokens(path)
    except TokenFileError as error:
        yield ("access", "missing", str(error), "give a file of `solrl-rollout token create`")
        return
    valid = [token for token in tokens if not token.expired]
    summary = f"{len(valid)} valid tokens of {len({token.tenant for token in valid})} tenants in {path}"
    yield ("access", "ok" if valid else "warn", summary, "" if valid else "make one: solrl-rollout token create")
    if path.stat().st_mode & 0o022:
        yield ("token file", "warn", f"other users may write {path}, and so let themselves in", f"chmod 600 {path}")


def port_row(settings: HttpSettings) -> Row:
    """Whether a service can listen on its port."""
    try:
        bind(settings.host, settings.port).close()
    except ProblemError as error:
        return ("port", "missing", error.problem.detail, error.problem.action or "")
    return "port", "ok", f"{settings.host}:{settings.port} is free", ""
