"""RFC 9457 problem documents for errors: the fault, the value received, the value expected, the remedy."""

from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict

from solrl_proto.printable import fault_text, printable, printable_texts

PROBLEM_MEDIA_TYPE = "application/problem+json"
_TYPE_PREFIX = "urn:solrl:problem:"

_Text = Annotated[str, AfterValidator(printable)]
_Value = Annotated[Any, AfterValidator(printable_texts)]


class Problem(BaseModel):
    """An RFC 9457 problem document. `type` is `urn:solrl:problem:<kind>`; kinds are stable, texts are not.

    `got`, `expected` and `action` are extension members; `where` names the field, tensor or header at fault.
    All texts are `printable`: without control characters, and without secrets of this process.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    type: str
    title: _Text
    status: int
    detail: _Text
    where: _Text | None = None
    got: _Value = None
    expected: _Value = None
    action: _Text | None = None

    @property
    def kind(self) -> str:
        """The last part of `type`, e.g. `version-conflict`. A newer service may send one that `ProblemKind` lacks."""
        return self.type.rsplit(":", 1)[-1]

    def __str__(self) -> str:
        return fault_text(f"{self.title}: {self.detail}", self.where, self.got, self.expected, self.action)


class ProblemKind(StrEnum):
    """Every kind of problem, with its HTTP status and title."""

    status: int
    title: str  # type: ignore[assignment]  # it hides str.title, which no kind needs

    def __new__(cls, value: str, status: int, title: str) -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.status = status
        member.title = title
        return member

    ADAPTER_CORRUPT = "adapter-corrupt", 500, "Stored adapter is damaged"
    ADAPTER_DTYPE = "adapter-dtype", 422, "Adapter refused"
    ADAPTER_KEYS = "adapter-keys", 422, "Adapter refused"
    ADAPTER_MALFORMED = "adapter-malformed", 422, "Adapter refused"
    ADAPTER_MERGE = "adapter-merge", 422, "Adapter cannot be merged"
    ADAPTER_METADATA = "adapter-metadata", 422, "Adapter refused"
    ADAPTER_MODEL = "adapter-model", 422, "Adapter is another model's"
    ADAPTER_NONFINITE = "adapter-nonfinite", 422, "Adapter refused"
    ADAPTER_QUOTA = "adapter-quota", 413, "Adapter quota exceeded"
    ADAPTER_SHAPE = "adapter-shape", 422, "Adapter refused"
    ADDRESS_UNAVAILABLE = "address-unavailable", 500, "Cannot listen"
    BAD_REQUEST = "bad-request", 400, "Bad request"
    BODY_TOO_LARGE = "body-too-large", 413, "Body is too large"
    DIGEST_HEADER = "digest-header", 422, "Content-Digest cannot be read"
    DIGEST_MISMATCH = "digest-mismatch", 422, "Digests differ"
    DRAINING = "draining", 503, "Service is stopping"
    ENGINE_DEAD = "engine-dead", 503, "Engine is dead"
    ENGINE_STALLED = "engine-stalled", 503, "Engine does not answer"
    FITTED_MISMATCH = "fitted-mismatch", 422, "Solver was fitted to another model"
    FOREIGN_ORIGIN = "foreign-origin", 403, "Request comes from another site"
    FORBIDDEN = "forbidden", 403, "Token does not allow this"
    GENERATION_FAILED = "generation-failed", 500, "Generation failed"
    HEAD_CONFLICT = "head-conflict", 409, "Run has another head"
    HEAD_TOO_LARGE = "head-too-large", 431, "Request head is too large"
    HOST_NOT_LOCAL = "host-not-local", 403, "Host is not this machine"
    INTERNAL = "internal", 500, "Internal error"
    INVALID_REQUEST = "invalid-request", 422, "Request is not valid"
    METHOD_NOT_ALLOWED = "method-not-allowed", 405, "Method Not Allowed"
    MODEL_NOT_FOUND = "model-not-found", 404, "Model is not hosted"
    NO_TOKENS = "no-tokens", 500, "No access control"
    NOISE_CONTRACT = "noise-contract", 409, "Noise contracts differ"
    NOT_FOUND = "not-found", 404, "Not Found"
    OUT_OF_MEMORY = "out-of-memory", 507, "Out of memory"
    PARENT_CONFLICT = "parent-conflict", 409, "Adapter parent is not the head"
    PRECISION_UNSUPPORTED = "precision-unsupported", 422, "Precision is not supported here"
    QUEUE_FULL = "queue-full", 429, "Queue is full"
    REQUEST_TIMEOUT = "request-timeout", 408, "Request took too long"
    REWARD_FAILED = "reward-failed", 500, "A reward failed"
    REWARD_NOT_LOADED = "reward-not-loaded", 422, "Reward is not loaded"
    REWARD_STALLED = "reward-stalled", 503, "A reward does not return"
    RUN_NOT_FOUND = "run-not-found", 404, "No such run"
    RUN_TAKEN = "run-taken", 409, "Run name is taken"
    SCORE_NONFINITE = "score-nonfinite", 422, "Score is not finite"
    SERVED_DIFFERENTLY = "served-differently", 409, "Service answered otherwise than asked"
    SERVICE_UNREACHABLE = "service-unreachable", 503, "Rollout service unreachable"
    STORE_UNAVAILABLE = "store-unavailable", 503, "Adapter store does not answer"
    TOKENS_UNREADABLE = "tokens-unreadable", 503, "Token file cannot be used"
    TOO_MANY_BYTES = "too-many-bytes", 503, "Too many bytes in flight"
    TOO_MANY_CANDIDATES = "too-many-candidates", 422, "Request is too large"
    UNAUTHENTICATED = "unauthenticated", 401, "Caller is not authenticated"
    UNEXPECTED_ANSWER = "unexpected-answer", 502, "Unexpected answer"
    UNKNOWN_PARAMETER = "unknown-parameter", 422, "Unknown query parameter"
    UNSUPPORTED_MEDIA_TYPE = "unsupported-media-type", 415, "Media type is not supported"
    VERSION_CONFLICT = "version-conflict", 409, "Adapter version is taken"
    VERSION_NOT_FOUND = "version-not-found", 404, "No such adapter version"

    def problem(
        self,
        detail: str,
        *,
        status: int | None = None,
        where: str | None = None,
        got: Any = None,
        expected: Any = None,
        action: str | None = None,
    ) -> Problem:
        """The problem document of this kind. `status` replaces the kind's own."""
        return Problem(
            type=f"{_TYPE_PREFIX}{self.value}",
            title=self.title,
            status=self.status if status is None else status,
            detail=detail,
            where=where,
            got=got,
            expected=expected,
            action=action,
        )


class ProblemError(Exception):
    """An error that carries its problem document.

    Attributes:
        problem: the document.
        retry_after: seconds until the same request may succeed; None if unknown.
    """

    def __init__(
        self, kind: ProblemKind | Problem, detail: str = "", *, retry_after: float | None = None, **fields: Any
    ) -> None:
        """A problem, or its kind with the arguments of `ProblemKind.problem`."""
        self.problem = kind if isinstance(kind, Problem) else kind.problem(detail, **fields)
        self.retry_after = retry_after
        super().__init__(str(self.problem))
