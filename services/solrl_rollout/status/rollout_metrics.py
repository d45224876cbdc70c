"""Metrics for Prometheus. The rest of the service passes plain numbers and does not depend on Prometheus.

The values of all labels are bounded: tenants come from the token file, models and rewards from the settings, and only
the busiest runs are shown.
"""

import asyncio
import math
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from prometheus_client import Gauge
from prometheus_client.core import GaugeMetricFamily, Metric
from solrl_http.request_metrics import RequestMetrics

from solrl_rollout.status.throughput import FinishedChunk
from solrl_rollout.store.errors import StoreUnavailableError

SHOWN_RUNS = 10
"""Number of runs with metrics of their own: the runs with the most recent engine time."""
_TRACKED_RUNS = 256
_NO_RUN = "-"  # work without an adapter
_SIZES_S = 2.0  # seconds that a scrape waits for the store
_HALF_LIFE = 300.0  # seconds until engine time counts for half


@dataclass(frozen=True)
class QueueState:
    """The queue: waiting candidates by tenant, and the age of the oldest chunk in seconds (0 if it is empty)."""

    candidates: Mapping[str, int] = field(default_factory=dict)
    oldest: float = 0.0


@dataclass
class _RunRecord:
    seconds: float = 0.0
    at: float = 0.0
    head: int | None = None
    served: int | None = None
    ended: bool = False

    def decayed(self, now: float) -> float:
        return self.seconds * math.exp2(-(now - self.at) / _HALF_LIFE)


class RolloutMetrics(RequestMetrics):
    """Counters and gauges of one service process. Every method may be called from any thread."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._records: dict[tuple[str, str], _RunRecord] = {}
        self._worker_memory: dict[str, Mapping[str, int]] = {}
        self._queue: Callable[[], QueueState] = QueueState
        self._read_sizes: Callable[[], Awaitable[Mapping[str, int]]] | None = None
        self._sizes: Mapping[str, int] = {}
        self._quota: int | None = None

        labels = ("model", "precision")
        self._candidates = self._counter("candidates", "Candidates generated and scored.", "tenant", *labels)
        self._chunks = self._counter("chunks", "Chunks of at most 24 candidates generated and scored.", *labels)
        self._step = self._histogram("step_seconds", "Seconds per step of a chunk.", *labels)
        self._reward = self._histogram("reward_seconds", "Seconds to score a chunk.", "model")
        self._switch = self._histogram("switch_seconds", "Seconds to switch the served adapter.", *labels)
        self._pushes = self._counter("adapter_pushes", "Adapter versions pushed.", "tenant")
        self._bytes = self._counter("adapter_bytes", "Bytes of the adapter versions pushed.", "tenant")
        self._faults = self._counter("reward_errors", "Chunks that a reward failed to score.", "reward")
        self._memory = self._counter(
            "out_of_memory",
            "Batches that ran out of memory; each is tried again, alone or in halves, or fails.",
            "model",
            "part",
        )
        self._worker_up = Gauge("solrl_worker_up", "1 while the worker serves.", ["worker"], registry=self.registry)
        self._worker_chunks = self._counter("worker_chunks", "Chunks finished by the worker.", "worker")
        self._worker_restarts = self._counter(
            "worker_restarts", "Times that the worker died and serves again.", "worker"
        )
        self.registry.register(self)

    def watch_queue(self, read: Callable[[], QueueState]) -> None:
        """Read the queue's state with `read` at every scrape."""
        self._queue = read

    def watch_store(self, read: Callable[[], Awaitable[Mapping[str, int]]], quota: int | None = None) -> None:
        """Read each tenant's stored bytes with `read` at every scrape; none is shown if the store does not answer.

        `quota`: most bytes of a tenant; None without a limit.
        """
        self._read_sizes, self._quota = read, quota

    async def update(self) -> None:
        """Read the sizes of all tenants' adapters in the store."""
        try:
            async with asyncio.timeout(_SIZES_S):
                self._sizes = await self._read_sizes() if self._read_sizes else {}
        except (StoreUnavailableError, TimeoutError):
            self._sizes = {}

    def chunk_finished(self, worker: str, chunk: FinishedChunk) -> None:
        """Count a worker's chunk, its candidates and steps, and the seconds spent on it."""
        labels = chunk.model, chunk.precision
        self._worker_chunks.labels(worker).inc()
        self._candidates.labels(chunk.tenant, *labels).inc(chunk.candidates)
        self._chunks.labels(*labels).inc()
        self._step.labels(*labels).observe(chunk.generate / chunk.steps)
        self._reward.labels(chunk.model).observe(chunk.reward)
        if chunk.switched:
            self._switch.labels(*labels).observe(chunk.switch)
        now = time.monotonic()
        with self._lock:
            record = self._records.get((chunk.tenant, chunk.run)) if chunk.run else self._record(chunk.tenant, _NO_RUN)
            if record:  # else the run was deleted
                record.seconds, record.at = record.decayed(now) + chunk.generate + chunk.reward, now

    def adapter_pushed(self, tenant: str, run: str, version: int, size: int) -> None:
        """Count a new adapter version of `size` bytes."""
        self._pushes.labels(tenant).inc()
        self._bytes.labels(tenant).inc(size)
        with self._lock:
            self._record(tenant, run).head = version

    def adapter_served(self, tenant: str, run: str, version: int, head: int | None) -> None:
        """Record a run's last served version, and its newest version, None if the run was deleted."""
        if head is None:
            return self.run_deleted(tenant, run)
        with self._lock:
            record = self._record(tenant, run)
            record.served, record.head = version, head

    def run_rewound(self, tenant: str, run: str, head: int) -> None:
        """Record a run's newest version after a rewind, which may have deleted the last served version."""
        with self._lock:
            record = self._record(tenant, run)
            record.served, record.head = None, head

    def run_reported(self, tenant: str, run: str, *, ended: bool) -> None:
        """Record whether a run's newest report was its last."""
        with self._lock:
            self._record(tenant, run).ended = ended

    def run_deleted(self, tenant: str, run: str) -> None:
        """Forget a run, so that it has no more metrics."""
        with self._lock:
            self._records.pop((tenant, run), None)

    def reward_failed(self, reward: str) -> None:
        self._faults.labels(reward).inc()

    def out_of_memory(self, model: str, part: str) -> None:
        """Count a batch that did not fit into memory. `part` is its precision, or "rewards"."""
        self._memory.labels(model, part).inc()

    def worker_up(self, worker: str, serving: bool) -> None:
        self._worker_up.labels(worker).set(serving)
        self._worker_restarts.labels(worker)

    def worker_restarted(self, worker: str) -> None:
        self._worker_restarts.labels(worker).inc()

    def worker_memory(self, worker: str, memory: Mapping[str, int]) -> None:
        """Record the memory, by kind, of the GPU of a worker's process."""
        with self._lock:
            self._worker_memory[worker] = memory

    def collect(self) -> Iterator[Metric]:
        """Gauges that are computed at each scrape; called by the registry."""
        state = self._queue()
        waiting = GaugeMetricFamily("solrl_queue_candidates", "Waiting candidates.", labels=["tenant"])
        for tenant, count in state.candidates.items():
            waiting.add_metric([tenant], count)
        yield waiting
        stored = GaugeMetricFamily(
            "solrl_tenant_adapter_bytes", "Bytes of the adapter versions in the store.", labels=["tenant"]
        )
        for tenant, size in self._sizes.items():
            stored.add_metric([tenant], size)
        yield stored
        if self._quota is not None:
            yield GaugeMetricFamily("solrl_tenant_adapter_limit_bytes", "Most bytes of each tenant.", self._quota)
        yield GaugeMetricFamily("solrl_queue_oldest_seconds", "Age of the oldest waiting chunk.", state.oldest)
        share = GaugeMetricFamily("solrl_run_share", "Share of recent engine time.", labels=["tenant", "run"])
        lag = GaugeMetricFamily(
            "solrl_adapter_lag_versions", "Newest version minus the version served last.", labels=["tenant", "run"]
        )
        idle = GaugeMetricFamily(
            "solrl_run_idle_seconds",
            "Time since the last candidates of a run that has not ended.",
            labels=["tenant", "run"],
        )
        for name, part, record in self._busiest():
            share.add_metric(name, part)
            if record.head is not None and record.served is not None:
                lag.add_metric(name, record.head - record.served)
            if not record.ended and name[1] != _NO_RUN:
                idle.add_metric(name, time.monotonic() - record.at)
        yield from (share, lag, idle)
        memory = GaugeMetricFamily("solrl_gpu_memory_bytes", "GPU memory by kind.", labels=["device", "kind"])
        with self._lock:
            of_workers = [(name, *entry) for name, kinds in self._worker_memory.items() for entry in kinds.items()]
        for device, kind, size in (*gpu_memory(), *of_workers):
            memory.add_metric([device, kind], size)
        yield memory

    def _busiest(self) -> list[tuple[tuple[str, str], float, _RunRecord]]:
        now = time.monotonic()
        with self._lock:
            weighed = sorted(((record.decayed(now), name) for name, record in self._records.items()), reverse=True)
            total = sum(seconds for seconds, _ in weighed) or 1.0
            return [(name, seconds / total, replace(self._records[name])) for seconds, name in weighed[:SHOWN_RUNS]]

    def _record(self, tenant: str, run: str) -> _RunRecord:
        """The record of a run. A new one replaces the run with the least recent engine time if the table is full."""
        if (tenant, run) not in self._records and len(self._records) >= _TRACKED_RUNS:
            now = time.monotonic()
            del self._records[min(self._records, key=lambda name: self._records[name].decayed(now))]
        return self._records.setdefault((tenant, run), _RunRecord(at=time.monotonic()))


def gpu_memory() -> Iterator[tuple[str, str, int]]:
    """Device, kind and bytes of the memory of each GPU that this process uses."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    for i in range(torch.cuda.device_count()):
        if not torch.cuda.memory_reserved(i):
            continue  # not ours: a query would create a context on it
        free, total = torch.cuda.mem_get_info(i)
        yield f"cuda:{i}", "total", total
        yield f"cuda:{i}", "free", free
        yield f"cuda:{i}", "reserved", torch.cuda.memory_reserved(i)
        yield f"cuda:{i}", "allocated", torch.cuda.memory_allocated(i)
