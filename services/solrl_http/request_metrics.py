"""Metrics of requests and of the process, which every service has."""

from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily

from solrl_http.tokens import Token

_REQUEST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_WORK = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class RequestMetrics:
    """Counters of requests, and a registry for a service's own metrics. Methods may be called from any thread."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._requests = self._counter("http_requests", "Requests answered.", "route", "method", "status")
        self._latency = self._histogram(
            "http_request_seconds", "Seconds until the end of the answer.", "route", "method", buckets=_REQUEST
        )
        self.open = Gauge("solrl_http_requests_in_progress", "Requests in progress.", registry=registry)
        build = Gauge("solrl_build_info", "The running version, as a label.", ["version"], registry=registry)
        build.labels(version("solrl")).set(1)
        ProcessCollector(registry=registry)

    def request_answered(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count an answered request; `route` is a template, never a path."""
        self._requests.labels(route, method, str(status)).inc()
        self._latency.labels(route, method).observe(seconds)

    def watch_tokens(self, read: Callable[[], Iterable[Token]]) -> None:
        """Read the service's tokens with `read` at every scrape."""
        self.registry.register(_Expiries(read))

    async def update(self) -> None:
        """Read what the next exposition needs from other processes."""

    def exposition(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"solrl_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str, buckets: tuple[float, ...] = _WORK) -> Histogram:
        return Histogram(f"solrl_{name}", text, labels, registry=self.registry, buckets=buckets)


class _Expiries:
    """When each token of the service expires; called by the registry."""

    def __init__(self, read: Callable[[], Iterable[Token]]) -> None:
        self._read = read

    def collect(self) -> Iterator[GaugeMetricFamily]:
        text = "When the token expires, in seconds since 1970; a token without an end has none."
        expiries = GaugeMetricFamily("solrl_token_expiry_timestamp_seconds", text, labels=["tenant", "token"])
        for token in self._read():
            if token.expires is not None:
                expiries.add_metric([token.tenant, token.id], token.expires.timestamp())
        yield expiries
