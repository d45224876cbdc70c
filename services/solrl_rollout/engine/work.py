"""What the service hands to the engine thread, and what comes back."""

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from solrl_core.adapter import Adapter
from solrl_core.generator import CHUNK
from solrl_core.sampler import Trajectory
from solrl_proto.identifiers import Tier
from solrl_proto.models import ModelInfo
from solrl_proto.rollouts import Plan, PromptItem, RolloutRequest


@dataclass(frozen=True)
class Hosted:
    """The loaded model: what `GET /v1/models` says of it, what `auto` means, the layout of adapters, where it runs."""

    info: ModelInfo
    default_precision: Tier
    layout: dict[str, tuple[int, int]]
    device: str
    at_once: Mapping[str, int]
    """What `HostedStatus.at_once` says; it changes while the service runs."""


@dataclass(frozen=True, eq=False)
class VersionedAdapter:
    """A decoded adapter and the digest that names its content."""

    digest: str
    adapter: Adapter


@dataclass(eq=False)
class Job:
    """What all chunks of one request share. `cancelled` stops a running one at its next step."""

    tenant: str
    run: str | None
    model: str
    adapter: VersionedAdapter | None
    precision: Tier
    plan: Plan
    rewards: tuple[str, ...]
    images: bool
    cancelled: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class Scored:
    """A finished chunk: rewards float32 [N] by name, images uint8 [N, H, W, 3] if asked for, seconds.

    `trajectory` is where its candidates stand, on the CPU, if they are to go on.
    """

    rewards: dict[str, torch.Tensor]
    images: torch.Tensor | None
    trajectory: Trajectory | None
    started: float
    switched: bool
    """Whether another adapter was served before."""
    switch: float
    generate: float
    reward: float


@dataclass(eq=False)
class Chunk:
    """At most 24 candidates of one prompt under one adapter and plan."""

    job: Job
    prompt: PromptItem
    seeds: Sequence[int]
    begin: Trajectory | None = None
    """Where they go on; None from their noise."""
    until: int | None = None
    """Steps behind them at its end; None for all."""
    returning: int = 0
    """How many of them may go on after that, in chunks of their own."""
    done: Future[Scored] = field(default_factory=Future)
    queued: float = field(default_factory=time.monotonic)

    @property
    def tenant(self) -> str:
        """Whose quota it counts against."""
        return self.job.tenant

    @property
    def run(self) -> tuple[str, str | None]:
        """Whose turn it takes; what asks for no adapter shares one turn a tenant."""
        return self.job.tenant, self.job.run

    @property
    def candidates(self) -> int:
        """How many it makes."""
        return len(self.seeds)

    @property
    def steps(self) -> int:
        """How many it takes."""
        begin = self.begin.index if self.begin is not None else 0
        return (self.until or self.job.plan.steps) - begin

    @property
    def kind(self) -> tuple[str, Tier, bool]:
        """What work of equal cost takes equally long; guidance is a second pass for most models."""
        return self.job.model, self.job.precision, self.job.plan.guidance > 1

    @property
    def cost(self) -> int:
        """Candidates × steps that it takes."""
        return len(self.seeds) * self.steps


def split(request: RolloutRequest, job: Job) -> list[list[Chunk]]:
    """The request's chunks, a list for each prompt; up to the pruning where the plan has one."""
    prune = job.plan.prune

    def chunk(prompt: PromptItem, seeds: Sequence[int], start: int) -> Chunk:
        part = seeds[start : start + CHUNK]
        if prune is None:
            return Chunk(job, prompt, part)
        return Chunk(job, prompt, part, until=prune.after, returning=min(max(prune.keep - start, 0), len(part)))

    return [
        [chunk(prompt, seeds, start) for start in range(0, len(seeds), CHUNK)] for prompt, seeds in request.groups()
    ]
