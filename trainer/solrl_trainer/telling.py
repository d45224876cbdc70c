"""Tells the service how a run goes, for its page; a training goes on whatever becomes of that."""

import base64
import io
import queue
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import torch
from PIL import Image
from solrl_proto.status import THUMBNAIL_SIDE, IterationReport, SamplePair, Samples, Spread
from torch.nn.functional import interpolate

from solrl_trainer.client import RolloutClient, rollout_token
from solrl_trainer.config import RunConfig
from solrl_trainer.rollouts import Gathered
from solrl_trainer.samples import BestAndWorst, best_and_worst

_PROMPTS = 2
_SHORTEST_PAUSE = 5.0
_AFTER_FAILURE = 60.0
_SHARE = 0.01
"""Part of the time that may go into images for the page."""
_LONGEST_END = 15.0
_PROMPT_LENGTH = 1000


class Teller:
    """Reports iterations in a thread of its own, and asks the service for a few images now and then.

    The images are asked for while the iteration trains, when a service that hosts nobody else has nothing to do and
    serves the very adapter they need. Use it as a context; on a good end it waits for what is under way.
    """

    def __init__(self, config: RunConfig, note: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self._config = config
        self._note = note
        self._clock = clock
        self._due = clock()
        self._failed = False
        self._samples: Samples | None = None
        self._work: queue.SimpleQueue[Callable[[RolloutClient], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="solrl-tell", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._work.put(None)
        if kind is None:
            self._thread.join(_LONGEST_END)

    def gathered(self, iteration: int, gathered: Gathered) -> None:
        """An iteration's samples are made; to be called before they are trained on."""
        if self._clock() >= self._due and self._work.empty():
            self._due = float("inf")
            self._work.put(lambda client: self._sample(client, iteration, gathered))

    def finished(self, line: Mapping[str, Any], gathered: Gathered) -> None:
        """An iteration is done; `line` is what metrics.jsonl got, with all its seconds."""
        report = _report(line, gathered, self._config)
        self._work.put(lambda client: self._tell(client, report))

    def _run(self) -> None:
        # A client of its own: the run's tries again for minutes, which is not for this.
        with RolloutClient(self._config.rollout_url, token=rollout_token(), timeout=120.0, patience=0.0) as client:
            while (work := self._work.get()) is not None:
                try:
                    work(client)
                except Exception as error:
                    self._fail(error)

    def _sample(self, client: RolloutClient, iteration: int, gathered: Gathered) -> None:
        pause = _AFTER_FAILURE
        try:
            shown = best_and_worst(gathered, client, self._config, prompts=_PROMPTS, each=1)
            # Of its work alone: waiting for its turn costs nobody anything.
            pause = max(_SHORTEST_PAUSE, shown.seconds / _SHARE)
            self._samples = Samples(
                iteration=iteration,
                version=gathered.version,
                precision=gathered.precision,  # type: ignore[arg-type]  # pydantic checks it
                numerics=gathered.numerics,  # type: ignore[arg-type]
                pairs=_pairs(shown),
            )
        finally:
            self._due = self._clock() + pause

    def _tell(self, client: RolloutClient, report: IterationReport) -> None:
        samples, self._samples = self._samples, None
        client.tell(self._config.run, report.model_copy(update={"samples": samples}))

    def _fail(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            self._note(f"the service's page does not show all of this run: {error}")


def _report(line: Mapping[str, Any], gathered: Gathered, config: RunConfig) -> IterationReport:
    made, half = gathered.made, config.explore.keep // 2

    def spread(values: torch.Tensor) -> Spread:
        best, worst = values[:, :half], values[:, half:]
        return Spread(mean=float(values.mean()), best=float(best.mean()), worst=float(worst.mean()))

    return IterationReport(
        iteration=line["iteration"],
        version=line["version"],
        explored_version=line["explored_version"],
        score=spread(made.scores),
        proxy_mean=line["proxy_mean"],
        loss=line["loss"],
        rewards={name: spread(values) for name, values in made.rewards.items()},
        seconds={name: round(seconds, 4) for name, seconds in line["seconds"].items()},
        planned=config.iterations,
    )


def _pairs(shown: BestAndWorst) -> tuple[SamplePair, ...]:
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
