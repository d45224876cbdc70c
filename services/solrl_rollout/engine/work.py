"""Units of the engine's work: jobs, their chunks, and chunks that are generated and scored."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from solrl_core.sampling.batches import CHUNK_SIZE
from solrl_core.sampling.device_events import DeviceEvent
from solrl_core.sampling.generator import GeneratorOutput
from solrl_engine.backend import GenerationRequest, VersionedAdapter
from solrl_proto.identifiers import Precision
from solrl_proto.models import ModelInfo
from solrl_proto.rollouts import Plan, PromptItem, RewardTime, RolloutRequest


@dataclass(frozen=True)
class HostedModel:
    """A loaded model, as the rest of the service sees it.

    Attributes:
        info: its entry in `GET /v1/models`.
        default_precision: precision that `auto` stands for.
        adapter_layout: module → (out_features, in_features) of every LoRA target.
        device: description of the hardware.
        remote_rewards: names of the rewards that reward servers compute.
    """

    info: ModelInfo
    default_precision: Precision
    adapter_layout: Mapping[str, tuple[int, int]]
    device: str
    remote_rewards: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class LeasedAdapter(VersionedAdapter):
    """A request's adapter: views of its stored `file`. `release` stops counting it in memory, also if repeated."""

    file: bytes
    release: Callable[[], None]


class ExternalReward(NamedTuple):
    """A reward that a run brings: its server's address, and the digest that the request pins, if any."""

    at: str
    digest: str | None


def release(adapter: VersionedAdapter | None) -> None:
    """Stop counting a request's adapter, if it has one. Harmless a second time."""
    if isinstance(adapter, LeasedAdapter):
        adapter.release()


@dataclass(eq=False)
class Job:
    """The part of a request that its chunks share.

    Setting `cancelled` stops a running chunk at its next step. The worker's `cancel` ends its requests to reward
    servers. `external_rewards` are the rewards that the run brings.
    """

    tenant: str
    run: str | None
    model: str
    adapter: VersionedAdapter | None
    precision: Precision
    plan: Plan
    rewards: tuple[str, ...]
    images: bool
    external_rewards: Mapping[str, ExternalReward] = field(default_factory=dict)
    cancelled: threading.Event = field(default_factory=threading.Event)

    @cached_property
    def run_servers(self) -> frozenset[str]:
        """Addresses of the reward servers that the run brings."""
        return frozenset(reward.at for reward in self.external_rewards.values())


@dataclass(eq=False)
class Chunk:
    """At most 24 candidates of one prompt under one adapter and plan.

    Attributes:
        result: resolved with the scored chunk, or with the error that ended it.
        queued_at: time of queueing, by `time.monotonic`.
        losses: number of workers that died while they made it.
    """

    job: Job
    prompt: PromptItem
    seeds: Sequence[int]
    result: "Future[ScoredChunk]" = field(default_factory=Future)
    queued_at: float = field(default_factory=time.monotonic)
    losses: int = 0

    @property
    def tenant(self) -> str:
        """The tenant whose quota it counts against."""
        return self.job.tenant

    @property
    def run(self) -> tuple[str, str | None, frozenset[str]]:
        """The run whose turn serves the chunk; all requests of a tenant without an adapter share one run.

        Requests that bring rewards have turns of their own, since they may have to wait for a server.
        """
        return self.job.tenant, self.job.run, self.job.run_servers

    @property
    def candidates(self) -> int:
        return len(self.seeds)

    @property
    def steps(self) -> int:
        return self.job.plan.steps

    @property
    def kind(self) -> tuple[str, Precision, bool]:
        """Chunks of one kind take equally long per cost; guidance is a second pass for most models."""
        return self.job.model, self.job.precision, self.job.plan.guidance > 1

    @property
    def cost(self) -> int:
        return len(self.seeds) * self.steps

    @property
    def request(self) -> GenerationRequest:
        """The candidates that its worker's backend generates."""
        job, texts = self.job, [self.prompt.text] * len(self.seeds)
        return GenerationRequest(texts, self.seeds, job.plan, job.precision)


@dataclass(frozen=True)
class GeneratedChunk:
    """A chunk whose candidates are computed, or still being computed on the device.

    Attributes:
        output: its candidates, complete once `finished` is reached.
        started_at: when the engine took it from the queue, by `time.monotonic`.
        switched: whether another adapter was served before.
        began, merged, finished: device events before the merge of the adapter, after it, and at the end.
    """

    chunk: Chunk
    output: GeneratorOutput
    started_at: float
    switched: bool
    began: DeviceEvent
    merged: DeviceEvent
    finished: DeviceEvent


@dataclass(frozen=True)
class ScoredChunk:
    """A finished chunk, everything on the CPU.

    Attributes:
        rewards: name → float32 [N].
        images: uint8 [N, H, W, 3] if the request asks for images, [N, F, H, W, 3] of clips, or the files that a worker
            process made of them.
        started_at: when its generation began, by `time.monotonic`.
        switched: whether another adapter was served before.
        switch, generate, reward: seconds spent on each.
        server_seconds: seconds of `reward` that reward servers took.
        times: seconds of `reward` that each reward took, by name.
    """

    rewards: dict[str, torch.Tensor]
    images: torch.Tensor | Sequence[bytes] | None
    started_at: float
    switched: bool
    switch: float
    generate: float
    reward: float
    server_seconds: float = 0.0
    times: Mapping[str, RewardTime] = field(default_factory=dict)


def cut_into_chunks(request: RolloutRequest, job: Job) -> list[list[Chunk]]:
    """The request's chunks, a list for each prompt."""
    return [
        [Chunk(job, prompt, seeds[i : i + CHUNK_SIZE]) for i in range(0, len(seeds), CHUNK_SIZE)]
        for prompt, seeds in request.groups()
    ]
