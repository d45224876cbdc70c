"""A backend without a model, for tests of the engine: seeds determine images, and the test controls the steps."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from solrl_core.adapter import encode_adapter
from solrl_core.sampling.device_events import DeviceEvent
from solrl_core.sampling.generator import GeneratorOutput
from solrl_core.sampling.noise import initial_noise
from solrl_core.sampling.sampler import Trajectory
from solrl_core.sampling.solvers import Euler
from solrl_engine.backend import Capabilities, GenerationRequest, Identity, VersionedAdapter
from solrl_proto.identifiers import Precision
from solrl_proto.models import PrecisionInfo
from solrl_proto.problems import ProblemError
from solrl_proto.rollouts import Plan, PromptItem
from solrl_rollout.engine.backends import BackendLoader, load_backend
from solrl_rollout.engine.engine import Engine
from solrl_rollout.engine.work import Chunk, Job, LeasedAdapter, ScoredChunk
from solrl_rollout.engine.workers.local import LocalWorker
from solrl_rollout.settings import ModelSpec, RolloutSettings
from solrl_rollout.status.rollout_metrics import RolloutMetrics
from tests.support.adapters import random_adapter

SHAPE = (3, 4, 4)
REWARD = "tests.services.served_rewards:brightness"


class FakeBackend:
    """Generates the noise of the seeds. Fits at most `room` candidates, and calls `on_step` before each step."""

    def __init__(self, *_: Any, on_step: Callable[[GenerationRequest], None] = lambda _: None) -> None:
        self.on_step = on_step
        self.room = 1000
        self.served: list[tuple[str, str | None]] = []
        self.batches: list[int] = []
        self.closed = False
        precisions = (("bf16", "native"), ("nvfp4", "emulated"))
        self.capabilities = Capabilities(
            tuple(PrecisionInfo(precision=t, numerics=n, how="", quantized_share=0) for t, n in precisions),  # type: ignore[arg-type]
            overlaps=False,
        )
        self.identity = Identity("fake", 4, 4, SHAPE, {}, {"linear": (4, 4)}, {}, "nowhere")

    def load(self, spec: ModelSpec, settings: RolloutSettings) -> "FakeBackend":
        """Return this backend for any model."""
        return self

    def without(self, **features: bool) -> "FakeBackend":
        """Change this backend's capabilities; returns the backend."""
        self.capabilities = replace(self.capabilities, **features)
        return self

    def batch_sizes(self, limit: int) -> Sequence[int]:
        return (limit,)

    def set_adapter(self, precision: Precision, adapter: VersionedAdapter | None) -> None:
        self.served.append((precision, adapter.digest if adapter else None))

    def generate(
        self, request: GenerationRequest, batch_size: int, between: Callable[[], None] | None = None
    ) -> GeneratorOutput:
        for _ in range(request.plan.steps):
            if between is not None:
                between()
            self.on_step(request)
        self.batches.append(len(request.seeds))
        if len(request.seeds) > self.room:
            raise torch.OutOfMemoryError(f"room for {self.room}")
        images = initial_noise(request.seeds, SHAPE)
        solver = Euler()
        solver.history = (images,)
        return GeneratorOutput(Trajectory(images, solver, request.plan.steps), images)

    def record_event(self) -> DeviceEvent:
        return DeviceEvent(torch.device("cpu"))

    def check(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


class Events:
    """Order of events: `+` generation began, `*` generation ended, `-` the chunk was scored."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._changed = threading.Condition()

    def add(self, event: str) -> None:
        with self._changed:
            self.seen.append(event)
            self._changed.notify_all()

    def wait_for(self, event: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: event in self.seen, 60), self.seen


class Observed(FakeBackend):
    """Records chunks by their prompts. `fault` may raise instead of generating."""

    def __init__(self, events: Events) -> None:
        super().__init__()
        self.events = events
        self.fault: Callable[[GenerationRequest], None] = lambda _: None

    def generate(
        self, request: GenerationRequest, batch_size: int, between: Callable[[], None] | None = None
    ) -> GeneratorOutput:
        self.events.add(f"+{request.prompt}")
        self.fault(request)
        generation = super().generate(request, batch_size, between)
        self.events.add(f"*{request.prompt}")
        return generation


class Gate:
    """Blocks every step of requests with the prompt `held` until it is opened."""

    def __init__(self, held: str = "held") -> None:
        self._held = held
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, request: GenerationRequest) -> None:
        if request.prompt == self._held:
            self.reached.set()
            assert self.opened.wait(600)


def engine_of(settings: RolloutSettings, load_backend: BackendLoader = load_backend) -> Engine:
    """An engine with one worker in this process, not started."""
    metrics = RolloutMetrics()
    return Engine(settings, metrics, [LocalWorker(settings, metrics, load_backend)])


@contextmanager
def running_engine(backend: FakeBackend, *opened: threading.Event, **settings: Any) -> Iterator[Engine]:
    """A running engine on a backend; at the end, the events are set before it is closed."""
    engine = engine_of(RolloutSettings(**{"rewards": (REWARD,), **settings}), backend.load)
    engine.start().result(600)
    try:
        yield engine
    finally:
        for event in opened:
            event.set()
        engine.close()


def job(run: str = "a", tenant: str = "t", steps: int = 1, precision: Precision = "bf16", **more: Any) -> Job:
    """A job of mini-sana."""
    fields: dict[str, Any] = {"adapter": None, "rewards": (REWARD,), "images": False, **more}
    return Job(tenant, run, "mini-sana", fields.pop("adapter"), precision, Plan(steps=steps), **fields)


def leased(layout: dict[str, tuple[int, int]], seed: int) -> LeasedAdapter:
    """A random adapter of a request."""
    file = encode_adapter(random_adapter(layout, seed))
    return LeasedAdapter(file.digest, file.adapter, file, lambda: None)


def chunk(of: Job, prompt: str = "a red circle", count: int = 4, **more: Any) -> Chunk:
    """A chunk of a job."""
    return Chunk(of, PromptItem(id="p", text=prompt), range(count), **more)


def scored(engine: Engine, one: Chunk) -> ScoredChunk:
    """The result of a chunk that an engine makes now."""
    engine.scheduler.submit([one])
    return one.result.result(600)


def fault_of(one: Chunk) -> ProblemError:
    """The error that ends a chunk."""
    with pytest.raises(ProblemError) as raised:
        one.result.result(600)
    return raised.value


def pinged(engine: Engine) -> None:
    """Return once every worker has answered, each between two steps."""
    for ping in engine.ping():
        ping.result(600)


def settle(engine: Engine) -> None:
    """Return once the engine's thread waits, or has begun whatever it begins now.

    It answers a ping before it takes a chunk, too; the second one is answered after the chunk's beginning.
    """
    for _ in range(2):
        pinged(engine)
