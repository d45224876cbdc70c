"""A budget for the decoded adapters of accepted requests, which stay in memory until they are served."""

from collections import Counter, deque

from solrl_proto.problems import ProblemError, ProblemKind

Content = tuple[str, str]
"""A model's name and an adapter's digest."""
_Held = tuple[str, Content]


class Lease:
    """A request's reference to an adapter. It ends with `release` or when it is garbage-collected, in any thread."""

    def __init__(self, held: _Held, ended: deque[_Held]) -> None:
        self._held: _Held | None = held
        self._ended = ended

    def release(self) -> None:
        """Stop counting the request; may be called again."""
        held, self._held = self._held, None
        if held is not None:
            self._ended.append(held)

    __del__ = release


class AdapterMemory:
    """Bytes of adapters of accepted requests. Content that several requests of a tenant share counts once."""

    def __init__(self, limit: int, tenant_limit: int) -> None:
        self.limit = limit
        self.tenant_limit = tenant_limit
        self._requests: Counter[_Held] = Counter()
        self._sizes: dict[_Held, int] = {}
        # A reference may end during `take`.
        self._ended: deque[_Held] = deque()

    @property
    def bytes(self) -> int:
        """Bytes of all tenants."""
        self._settle()
        return sum(self._sizes.values())

    def take(self, tenant: str, content: Content, size: int) -> Lease:
        """Count `content` for one more request of a tenant.

        Raises:
            ProblemError: 503 `too-many-bytes`: there is no room for it.
        """
        held = tenant, content
        self._settle()
        if held not in self._sizes:
            of_tenant = sum(size for (owner, _), size in self._sizes.items() if owner == tenant)
            _require("all requests", self.bytes, size, self.limit)
            _require("the tenant's requests", of_tenant, size, self.tenant_limit)
            self._sizes[held] = size
        self._requests[held] += 1
        return Lease(held, self._ended)

    def _settle(self) -> None:
        while self._ended:
            ended = self._ended.popleft()
            self._requests[ended] -= 1
            if not self._requests[ended]:
                del self._requests[ended], self._sizes[ended]


def _require(whose: str, held: int, size: int, limit: int) -> None:
    if held + size > limit:
        raise ProblemError(
            ProblemKind.TOO_MANY_BYTES,
            f"the adapters of {whose} have {held} bytes until they are served, and {size} more would exceed the limit",
            retry_after=5,
            where="body.adapter",
            got=size,
            expected=f"at most {max(0, limit - held)} bytes now",
            action="send the same request again later, or raise max_queued_adapter_bytes of the service",
        )
