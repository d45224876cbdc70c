"""Reports of a run to the service, for its page. Failures never stop a training."""

import base64
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from solrl_client.rollouts import RolloutClient
from solrl_core.image_files import FRAME_MS, small_images, webp
from solrl_core.rewards.frames import evenly
from solrl_proto.model_names import split_checkpoint
from solrl_proto.problems import ProblemError
from solrl_proto.status import (
    THUMBNAIL_BYTES,
    THUMBNAIL_SIDE,
    HeldOut,
    RunSettings,
    SamplePair,
    Samples,
)

from solrl_trainer.records.records import HeldOutRecord, IterationRecord
from solrl_trainer.rollouts.exploration import IterationSamples
from solrl_trainer.rollouts.image_comparisons import ImageComparisons, compare_images
from solrl_trainer.run_folder.figures import value_text
from solrl_trainer.service.run_requests import RunRequests
from solrl_trainer.settings.config import MACHINE_SETTINGS, RunConfig

logger = logging.getLogger(__name__)

_PROMPTS = 2
_SHORTEST_PAUSE = 5.0
_PAUSE_AFTER_FAILURE = 60.0
_SHARE = 0.01
"""Share of the service's time that images for the page may take."""
_LONGEST_END = 15.0
_VALUE_LENGTH = 256
_PROMPT_LENGTH = 1000
_REASON_LENGTH = 512
_THUMBNAIL_FRAMES = 12


class StatusReporter:
    """Reports iterations from a background thread, and occasionally requests a few images from the service.

    Images are requested while the iteration trains: the service is then idle unless it serves other runs, and still has
    the right adapter merged. As a context manager, it waits for pending work on a clean exit.
    """

    def __init__(
        self,
        client: RolloutClient,
        config: RunConfig,
        source: Callable[[], RunRequests],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the thread, which calls `source` for requests by `client`: without retries, closed at the end."""
        self._client = client
        self._config = config
        self._source = source
        self._clock = clock
        self._settings: RunSettings | None = None
        self._held_out: list[HeldOut] = []
        self._reported: IterationRecord | None = None
        self._ended: str | None = None
        self._arrived = False
        self._images_due = clock()
        self._failed = False
        self._samples: Samples | None = None
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._work.put(self._describe)
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
        """Fetch images of some samples for the report, if due; `show_comparisons` gets the last iteration's."""
        if iteration + 1 < self._config.iterations and self._work.empty() and self._clock() >= self._images_due:
            self._images_due = math.inf
            self._work.put(lambda: self._fetch(iteration, samples))

    def show_comparisons(self, iteration: int, samples: IterationSamples, pairs: ImageComparisons | None) -> None:
        """Show some of these images in the iteration's report; without any, fetch the few that are shown."""
        if pairs is None:
            self._work.put(lambda: self._fetch(iteration, samples))
        else:
            ends = pairs.best_and_worst(_PROMPTS)
            self._work.put(lambda: self._keep(iteration, samples, ends))

    def evaluated(self, record: HeldOutRecord) -> None:
        """Report a held-out evaluation: again with the iteration before it, or with the first iteration."""
        self._work.put(lambda: self._report_evaluation(record))

    def report(self, record: IterationRecord) -> None:
        self._work.put(lambda: self._report(record))

    def ended(self, reason: str) -> None:
        """Report the newest iteration as the last, and why."""
        self._work.put(lambda: self._end(reason))

    def _run(self) -> None:
        with self._client:
            while (work := self._work.get()) is not None:
                try:
                    work()
                except Exception as error:
                    if not self._failed:
                        self._failed = True
                        logger.warning(f"the service's page does not show all of this run: {error}")

    def _describe(self) -> None:
        self._settings = run_settings(self._config)

    def _fetch(self, iteration: int, samples: IterationSamples) -> None:
        try:
            pairs = compare_images(samples, self._source().images_of, prompts=_PROMPTS, per_end=1)
        except BaseException:
            self._images_due = self._clock() + _PAUSE_AFTER_FAILURE
            raise
        # Time in the service's queue is not its work.
        self._images_due = self._clock() + max(_SHORTEST_PAUSE, pairs.seconds / _SHARE)
        self._keep(iteration, samples, pairs)

    def _keep(self, iteration: int, samples: IterationSamples, pairs: ImageComparisons) -> None:
        exploration = samples.exploration
        self._samples = Samples(
            iteration=iteration,
            version=exploration.version,
            precision=exploration.precision,  # type: ignore[arg-type]  # pydantic checks it
            numerics=exploration.numerics,  # type: ignore[arg-type]
            pairs=_pairs(pairs),
        )
        if self._reported is not None and self._reported.iteration == iteration:  # they come after its report
            self._report(self._reported)

    def _report(self, record: IterationRecord) -> None:
        if self._arrived and record is not self._reported:
            self._held_out = []
        self._reported = record
        samples, self._samples = self._samples, None
        self._send(samples)

    def _report_evaluation(self, record: HeldOutRecord) -> None:
        self._held_out.append(record.message())
        if self._reported is not None and self._reported.version == record.version:
            self._send(None)

    def _end(self, reason: str) -> None:
        if self._reported is not None:  # a resumed run may train no more
            self._ended = reason[:_REASON_LENGTH]
            self._send(None)

    def _send(self, samples: Samples | None) -> None:
        """Report the newest iteration, again without evaluations, settings and samples if the service refuses one.

        Evaluations around the iteration bring the settings, which a restarted service lacks.
        """
        assert self._reported is not None
        self._arrived = False
        held_out, settings = self._held_out[-2:], self._settings if self._held_out else None
        report = self._reported.report(self._config.iterations, samples, held_out, settings, self._ended)
        try:
            self._client.report_iteration(self._config.run, report)
        except ProblemError as error:
            if error.problem.status == 422:  # as of a service with other limits
                plain = self._reported.report(self._config.iterations, None, ended=self._ended)
                self._client.report_iteration(self._config.run, plain)
                self._arrived = True
            raise
        self._arrived = True


def run_settings(config: RunConfig) -> RunSettings:
    """Settings of a run for the page, without addresses and paths of a machine; dotted names."""
    place = Path(split_checkpoint(config.model)[0] or config.model)
    public = {"prompts": config.shown_prompts, **({"model": place.name} if place.exists() else {})}
    values: dict[str, Any] = {}
    for name, value in config.model_copy(update=public).model_dump(mode="json", exclude=set(MACHINE_SETTINGS)).items():
        section = isinstance(value, dict) and name != "rewards"
        values |= {f"{name}.{key}": entry for key, entry in value.items()} if section else {name: value}
    shortened = {name: value_text(value, _VALUE_LENGTH) for name, value in values.items()}
    return RunSettings(trained=config.weights, values=shortened)


def _pairs(pairs: ImageComparisons) -> tuple[SamplePair, ...]:
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
        for pair, explored, regenerated in zip(pairs.pairs, pairs.explored, pairs.regenerated, strict=True)
    )


def thumbnail(image: torch.Tensor) -> str:
    """Base64 WebP of an image float32 [3, H, W] in [0, 1], at most `THUMBNAIL_SIDE` pixels a side.

    Of a clip [F, 3, H, W], an animated one with as many of its frames as a thumbnail has room for.
    """
    pixels = small_images(image, THUMBNAIL_SIDE).movedim(-3, -1)
    if pixels.ndim == 3:
        return base64.b64encode(webp(pixels, quality=90)).decode()
    for count in (_THUMBNAIL_FRAMES, _THUMBNAIL_FRAMES // 2, 1):
        frames = pixels[evenly(count, len(pixels))]
        text = base64.b64encode(webp(frames, frame_ms=FRAME_MS * len(pixels) // len(frames), quality=50)).decode()
        if len(text) <= THUMBNAIL_BYTES:
            break
    return text
