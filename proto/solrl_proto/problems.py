"""Errors as RFC 9457 problem documents: what was wrong, what was got, what was expected, what to do."""

from typing import Any

from pydantic import BaseModel, ConfigDict

PROBLEM_MEDIA_TYPE = "application/problem+json"


class Problem(BaseModel):
    """An RFC 9457 problem document. `type` is `urn:solrl:problem:<kind>`; kinds are stable, texts are not.

    `got`, `expected` and `action` are extension members; `where` names the field, tensor or header at fault.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    type: str
    title: str
    status: int
    detail: str
    where: str | None = None
    got: Any = None
    expected: Any = None
    action: str | None = None

    @property
    def kind(self) -> str:
        """The last part of `type`, e.g. `version-conflict`."""
        return self.type.rsplit(":", 1)[-1]

    def __str__(self) -> str:
        parts = [f"{self.title}: {self.detail}"]
        parts += [f"at {self.where}"] if self.where else []
        parts += [f"got {self.got!r}"] if self.got is not None else []
        parts += [f"expected {self.expected!r}"] if self.expected is not None else []
        parts += [self.action] if self.action else []
        return "; ".join(parts)


class ProblemError(Exception):
    """An error that carries its problem document, raised wherever a mistake is found."""

    def __init__(
        self,
        kind: str,
        status: int,
        title: str,
        detail: str,
        *,
        where: str | None = None,
        got: Any = None,
        expected: Any = None,
        action: str | None = None,
    ) -> None:
        self.problem = Problem(
            type=f"urn:solrl:problem:{kind}",
            title=title,
            status=status,
            detail=detail,
            where=where,
            got=got,
            expected=expected,
            action=action,
        )
        super().__init__(str(self.problem))
