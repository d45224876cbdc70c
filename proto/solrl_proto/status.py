"""Messages about progress: iterations reported by trainers, and the status of runs, queue and throughput."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from solrl_proto.identifiers import Message, ModelName, RunName, Seed, Tier, Version, at_most
from solrl_proto.models import PrecisionInfo
from solrl_proto.rollouts import RewardTime

THUMBNAIL_SIDE = 128
"""Pixels of a thumbnail's longer side, at most."""

Figure = Annotated[float, Field(ge=-1e12, le=1e12)]
Seconds = Annotated[float, Field(ge=0, le=1e12)]
Label = Annotated[str, StringConstraints(min_length=1, max_length=128)]
Thumbnail = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9+/]+={0,2}$", max_length=49_152)]
"""Base64 of a WebP or PNG."""


class Spread(Message):
    """A reward of the samples that were trained on: all of them, the best half and the worst half of each prompt."""

    mean: Figure
    best: Figure
    worst: Figure


class SamplePair(Message):
    """One seed twice: as explored, and as regenerated for training."""

    place: Literal["best", "worst"]
    prompt: Annotated[str, StringConstraints(max_length=4096)]
    seed: Seed
    proxy: Figure
    """Score of `explored`."""
    true: Figure
    """Score of `regenerated`."""
    explored: Thumbnail
    regenerated: Thumbnail


class Samples(Message):
    """Some of the best and worst samples of an iteration."""

    iteration: Version
    version: Version
    """The adapter version that they were explored under."""
    precision: Tier
    numerics: Literal["native", "emulated"]
    pairs: Annotated[tuple[SamplePair, ...], Field(min_length=1, max_length=4, fail_fast=True)]


class ScoringTime(RewardTime):
    """Time that a reward took in an iteration, and where."""

    reward: Label
    of: Literal["candidates", "samples"]
    """The scored images: explored candidates, or the samples that are trained on."""
    by: Literal["service", "trainer"]
    """The program that computed it, or asked its server."""


class Point(Message):
    """The result of an iteration."""

    iteration: Version
    version: Version
    """The adapter version that it produced."""
    explored_version: Version
    score: Spread
    """The trained score, a weighted sum of the rewards."""
    proxy_mean: Figure
    """Mean score of all explored candidates."""
    spearman: Annotated[float, Field(ge=-1, le=1)] | None = None
    """Rank fidelity of exploration, if it was measured before the iteration."""
    loss: Figure
    rewards: Annotated[dict[Label, Spread], Field(default_factory=dict, max_length=16), at_most(16)]
    seconds: Annotated[dict[Label, Seconds], Field(default_factory=dict, max_length=16), at_most(16)]
    """Duration of each phase."""
    scoring: Annotated[tuple[ScoringTime, ...], Field(max_length=64, fail_fast=True)] = ()
    """The time of each reward, and where it ran."""
    planned: Version | None = None
    """Planned iterations of the run."""


class IterationReport(Point):
    """Body of `POST /v1/runs/{run}/iterations`. Reporting an iteration again replaces it and all later ones."""

    samples: Samples | None = None


class Curve(Message):
    """A run's curves, thinned out for drawing: some iterations, and their values by name."""

    iterations: tuple[int, ...]
    series: dict[str, tuple[float | None, ...]]


class RunDetail(Message):
    """Answer of `GET /v1/runs/{run}/iterations`."""

    run: RunName
    curve: Curve
    """`best`, `mean`, `worst` and `proxy` of the score, `loss`, `reward:<name>`, `seconds:<phase>`; and `spearman`, the
    newest at each iteration, if rank fidelity was measured."""
    samples: Samples | None


class RunStatus(Message):
    """One of the tenant's runs."""

    run: RunName
    model: ModelName
    head: Version
    versions: int
    """Number of stored adapter versions, of which `pinned` are pinned."""
    pinned: int
    size: int
    """Bytes of the stored versions."""
    revision: int | None
    """Grows with each reported iteration; null if there is none."""
    age: Seconds | None
    """Seconds since the last report."""
    last: Point | None
    curve: Curve | None
    """Score: `best`, `mean`, `worst`, `proxy`. Null if nothing was reported since the requested revision."""


class Waiting(Message):
    """Waiting work of one run; `run` is null for requests without an adapter."""

    run: RunName | None
    candidates: int
    age: Seconds


class QueueStatus(Message):
    """The tenant's waiting work, oldest first."""

    candidates: int
    limit: int
    oldest: Seconds
    runs: tuple[Waiting, ...]


class Throughput(Message):
    """Work done for the tenant in the last `window` seconds."""

    window: Seconds
    candidates_per_second: float
    switches: int
    """Number of adapter changes for it."""
    step_seconds: float | None
    """Mean duration of one step of a chunk."""
    history: tuple[float, ...]
    """Candidates per second in each twelfth of the last minute, oldest first."""


class HostedStatus(Message):
    """A hosted model, in brief."""

    name: ModelName
    family: str
    width: int
    height: int
    default_precision: Tier
    precisions: tuple[PrecisionInfo, ...]
    at_once: dict[str, int] = Field(default_factory=dict)
    """Batch limits below 24, set after running out of memory: per precision, and `rewards` for scoring."""


class WorkerStatus(Message):
    """A worker, which generates and scores on one device."""

    name: str
    serving: bool
    """False while it is loaded again, or once it is given up."""
    chunks: int
    """Chunks of at most 24 candidates that it has finished."""
    restarts: int
    """Times that it died and was loaded again."""


class ServiceStatus(Message):
    """The answering process."""

    version: str
    tenant: str
    uptime: Seconds
    draining: bool
    store: Literal["memory", "redis"]
    models: tuple[HostedStatus, ...]
    workers: tuple[WorkerStatus, ...] = ()


class StatusAnswer(Message):
    """Answer of `GET /v1/status`, limited to the caller's tenant."""

    service: ServiceStatus
    queue: QueueStatus
    throughput: Throughput
    runs: tuple[RunStatus, ...]
    """By name."""
    revision: int
    """Revision of the newest report; a request with `since` set to it gets only newer curves."""
