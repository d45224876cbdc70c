"""What a trainer tells of its iterations, and what the service shows of runs, queue and throughput."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from solrl_proto.identifiers import Message, ModelName, RunName, Seed, Tier, Version
from solrl_proto.models import PrecisionInfo

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
    """One seed twice: as it was explored, and as it was made again to be trained on."""

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
    """Some of an iteration's best and worst."""

    iteration: Version
    version: Version
    """Of the adapter they were explored under."""
    precision: Tier
    numerics: Literal["native", "emulated"]
    pairs: Annotated[tuple[SamplePair, ...], Field(min_length=1, max_length=4)]


class Point(Message):
    """What an iteration came to."""

    iteration: Version
    version: Version
    """Of the adapter that it made."""
    explored_version: Version
    score: Spread
    """What is trained: the weighted sum of the rewards."""
    proxy_mean: Figure
    """Mean score of all explored candidates."""
    loss: Figure
    rewards: Annotated[dict[Label, Spread], Field(default_factory=dict, max_length=16)]
    seconds: Annotated[dict[Label, Seconds], Field(default_factory=dict, max_length=16)]
    """By phase."""
    planned: Version | None = None
    """Iterations that the run is to have."""


class IterationReport(Point):
    """Body of `POST /v1/runs/{run}/iterations`. Telling an iteration again replaces it and all after it."""

    samples: Samples | None = None


class Curve(Message):
    """Some of a run's iterations, enough to draw all of them, and their values by name."""

    iterations: tuple[int, ...]
    series: dict[str, tuple[float | None, ...]]


class RunDetail(Message):
    """Answer of `GET /v1/runs/{run}/iterations`."""

    run: RunName
    curve: Curve
    """`best`, `mean`, `worst` and `proxy` of the score, `loss`, `reward:<name>`, `seconds:<phase>`."""
    samples: Samples | None


class RunStatus(Message):
    """One of the tenant's runs."""

    run: RunName
    model: ModelName
    head: Version
    versions: int
    """How many adapter versions are kept, of which `pinned` are pinned."""
    pinned: int
    size: int
    """Bytes of the kept versions."""
    revision: int | None
    """Grows with each iteration that is told; null if none was."""
    age: Seconds | None
    """Since then."""
    last: Point | None
    curve: Curve | None
    """Score: `best`, `mean`, `worst`, `proxy`. Null where it was not told since the revision that was asked for."""


class Waiting(Message):
    """What waits of one run; `run` is null for what asks for no adapter."""

    run: RunName | None
    candidates: int
    age: Seconds


class QueueStatus(Message):
    """What waits of the tenant's, oldest first."""

    candidates: int
    limit: int
    oldest: Seconds
    runs: tuple[Waiting, ...]


class Throughput(Message):
    """What was made for the tenant in the last `window` seconds."""

    window: Seconds
    candidates_per_second: float
    switches: int
    """How often another adapter was merged in for it."""
    step_seconds: float | None
    """Of a step of a chunk, on average."""
    history: tuple[float, ...]
    """Candidates a second in each twelfth of the last minute, oldest first."""


class HostedStatus(Message):
    """A hosted model in short."""

    name: ModelName
    family: str
    width: int
    height: int
    default_precision: Tier
    precisions: tuple[PrecisionInfo, ...]
    at_once: dict[str, int] = Field(default_factory=dict)
    """How many candidates are made (by precision) or scored (`rewards`) at once, where memory ran out for 24."""


class ServiceStatus(Message):
    """The process that answers."""

    version: str
    tenant: str
    uptime: Seconds
    draining: bool
    store: Literal["memory", "redis"]
    models: tuple[HostedStatus, ...]


class StatusAnswer(Message):
    """Answer of `GET /v1/status`: what the caller's tenant may see."""

    service: ServiceStatus
    queue: QueueStatus
    throughput: Throughput
    runs: tuple[RunStatus, ...]
    """By name."""
    revision: int
    """Of the newest iteration told; ask with `since` this and only newer curves are sent."""
