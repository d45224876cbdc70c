"""Messages about progress: iterations reported by trainers, and the status of runs, queue and throughput."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from solrl_proto.identifiers import Message, ModelName, Precision, RunName, Seed, Version, at_most
from solrl_proto.models import PrecisionInfo
from solrl_proto.rollouts import RewardTime

THUMBNAIL_SIDE = 128
"""Pixels of a thumbnail's longer side, at most."""
THUMBNAIL_BYTES = 49_152
"""Most bytes of a thumbnail in base64."""

Figure = Annotated[float, Field(ge=-1e12, le=1e12)]
Seconds = Annotated[float, Field(ge=0, le=1e12)]
Label = Annotated[str, StringConstraints(min_length=1, max_length=128)]
Thumbnail = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9+/]+={0,2}$", max_length=THUMBNAIL_BYTES)]
"""Base64 of a WebP, which may be animated, or PNG."""


class Spread(Message):
    """Mean reward of the trained samples: of all, of the best half and of the worst half of each prompt."""

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
    precision: Precision
    numerics: Literal["native", "emulated"]
    pairs: Annotated[tuple[SamplePair, ...], Field(min_length=1, max_length=4, fail_fast=True)]


class Estimate(Message):
    """Mean of a held-out reward, and the means at both ends of the 95 % interval of its gain over version 0."""

    mean: Figure
    low: Figure
    high: Figure


class HeldOut(Message):
    """An evaluation of a version on held-out prompts, the same prompts and seeds at each version."""

    version: Version
    images: Annotated[int, Field(ge=1, le=10**9)]
    rewards: Annotated[dict[Label, Estimate], Field(min_length=1, max_length=17), at_most(17)]
    """At most 16 rewards. The one that is trained on comes first; with several, their sum."""


class RunSettings(Message):
    """Trained rewards and settings of a run."""

    trained: Annotated[dict[Label, Figure], Field(min_length=1, max_length=16), at_most(16)]
    """Trained reward → its weight in the score."""
    values: Annotated[
        dict[Label, Annotated[str, StringConstraints(max_length=256)]],
        Field(default_factory=dict, max_length=128),
        at_most(128),
    ]
    """Setting → its value as text, for the page."""


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
    ended: Annotated[str, StringConstraints(max_length=512)] | None = None
    """Why the run ended with this iteration, before the planned ones."""
    held_out: Annotated[tuple[HeldOut, ...], Field(max_length=2, fail_fast=True)] = ()
    """Evaluations of the version that the iteration produced, and of version 0 before the first iteration."""
    settings: RunSettings | None = None
    """Settings of the run, in its first report and in the first after it is resumed."""


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
    """`best`, `mean`, `worst` and `proxy` of the score, `loss`, `reward:<name>`, `seconds:<phase>`, and `elapsed`, the
    seconds since the beginning without evaluations; and `spearman`, the newest at each iteration, if rank fidelity was
    measured."""
    held_out: tuple[HeldOut, ...] = ()
    """All held-out evaluations of the run by version, thinned."""
    settings: RunSettings | None = None
    samples: Samples | None


class RunStatus(Message):
    """One of the tenant's runs."""

    run: RunName
    model: ModelName
    head: Version
    versions: int
    """Number of stored adapter versions."""
    size: int
    """Bytes of the stored versions."""
    revision: int | None
    """Grows with each reported iteration; null if there is none."""
    age: Seconds | None
    """Seconds since the last report."""
    last: Point | None
    curve: Curve | None
    """Score: `best`, `mean`, `worst`, `proxy`. Null if nothing was reported since the requested revision."""
    held_out: tuple[HeldOut, ...] = ()
    """The first and the newest held-out evaluation, of the first reward alone; with the curve."""


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
    frames: Annotated[int, Field(ge=1, exclude_if=lambda value: value == 1)] = 1
    """Frames of a clip; absent for a model that makes images."""
    default_precision: Precision
    precisions: tuple[PrecisionInfo, ...]


class WorkerStatus(Message):
    """A worker, which generates and scores on one device."""

    name: str
    serving: bool
    """False while it is loaded again, or once it is given up."""
    given_up: bool = False
    """It died too often, and is not loaded again until the service restarts."""
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
    """Sorted by name."""
    revision: int
    """Revision of the newest report; a request with `since` set to it gets only newer curves."""
