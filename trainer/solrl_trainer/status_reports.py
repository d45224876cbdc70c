"""Reports of a run to the service, for its page. Failures never stop a training."""

import base64
import io
import queue
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import torch
from PIL import Image
from solrl_client.rollouts import RolloutClient
from solrl_proto.status import THUMBNAIL_SIDE, SamplePair, Samples
from torch.nn.functional import interpolate

from solrl_trainer.records import IterationRecord
from solrl_trainer.report.pairs import CandidatePairs, candidate_pairs
from solrl_trainer.rollouts.iteration import IterationSamples
from solrl_trainer.rollouts.source import RolloutSource

_PROMPTS = 2
_SHORTEST_PAUSE = 5.0
_PAUSE_AFTER_FAILURE = 60.0
_SHARE = 0.01
"""Share of the service's time that images for the page may take."""
_LONGEST_END = 15.0
_PROMPT_LENGTH = 1000


class ImageBudget:
    """Limits images for the page to a hundredth of the service's time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds."""
        self._clock = clock
        self._due = clock()

    def take(self) -> bool:
        """Whether images may be requested now. After True, returns False until `spent` or `failed` is called."""
        if self._clock() < self._due:
            return False
        self._due = float("inf")
        return True

    def spent(self, seconds: float) -> None:
        """Record that images took `seconds` of the service's work; time in its queue does not count."""
        self._due = self._clock() + max(_SHORTEST_PAUSE, seconds / _SHARE)

    def failed(self) -> None:
        """Record that requesting images failed."""
        self._due = self._clock() + _PAUSE_AFTER_FAILURE


class StatusReporter:
    """Reports iterations from a background thread, and occasionally requests a few images from the service.

    Images are requested while the iteration trains: the service is then idle unless it serves other runs, and still has
    the right adapter merged. As a context manager, it waits for pending work on a clean exit.
    """

    def __init__(
        self,
        client: RolloutClient,
        run: str,
        source: Callable[[], RolloutSource],
        planned: int,
        note: Callable[[str], None],
    ) -> None:
        """Start the thread.

        Args:
            client: a separate client that does not retry; closed at the end.
            run: name of the run at the service.
            source: returns a source of candidates that uses this client; called in the thread.
            planned: iterations of the whole run.
            note: called once, when a report is lost.
        """
        self._client = client
        self._run_name = run
        self._source = source
        self._planned = planned
        self._note = note
        self._budget = ImageBudget()
        self._failed = False
        self._samples: Samples | None = None
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="solrl-status", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._work.put(None)
        if kind is None:
            self._thread.join(_LONGEST_END)

    def show(self, iteration: int, samples: IterationSamples) -> None:
        """Fetch images of some samples for the iteration's report, if new ones are due."""
        if self._work.empty() and self._budget.take():
            self._work.put(lambda: self._fetch(iteration, samples))

    def report(self, record: IterationRecord) -> None:
        """Report an iteration."""
        self._work.put(lambda: self._tell(record))

    def _run(self) -> None:
        with self._client:
            while (work := self._work.get()) is not None:
                try:
                    work()
                except Exception as error:
                    self._fail(error)

    def _fetch(self, iteration: int, samples: IterationSamples) -> None:
        exploration = samples.exploration
        try:
            shown = candidate_pairs(samples, self._source(), prompts=_PROMPTS, each=1)
        except BaseException:
            self._budget.failed()
            raise
        self._budget.spent(shown.seconds)
        self._samples = Samples(
            iteration=iteration,
            version=exploration.version,
            precision=exploration.precision,  # type: ignore[arg-type]  # pydantic checks it
            numerics=exploration.numerics,  # type: ignore[arg-type]
            pairs=_pairs(shown),
        )

    def _tell(self, record: IterationRecord) -> None:
        samples, self._samples = self._samples, None
        self._client.tell(self._run_name, record.report(self._planned, samples))

    def _fail(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            self._note(f"the service's page does not show all of this run: {error}")


def _pairs(shown: CandidatePairs) -> tuple[SamplePair, ...]:
    return tuple(
        SamplePair(
            place=pair.place,
            prompt=pair.prompt[:_PROMPT_LENGTH],
            seed=pair.seed,
            proxy=pair.proxy,
            true=pair.true,
            explored=thumbnail(explored),
            regenerated=thumbnail(regenerated),
        )
        for pair, explored, regenerated in zip(shown.pairs, shown.explored, shown.regenerated, strict=True)
    )


def thumbnail(image: torch.Tensor) -> str:
    """Base64 WebP of an image float32 [3, H, W] in [0, 1], at most `THUMBNAIL_SIDE` pixels a side."""
    side = max(image.shape[-2:])
    if side > THUMBNAIL_SIDE:
        size = [max(1, round(length * THUMBNAIL_SIDE / side)) for length in image.shape[-2:]]
        image = interpolate(image[None], size=size, mode="area")[0]
    file = io.BytesIO()
    pixels = (image.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    Image.fromarray(pixels).save(file, "WEBP", quality=90)
    return base64.b64encode(file.getvalue()).decode()
