"""A hosted model: sets the adapter and generates chunks in batches that fit; holds the model's scorer."""

import logging
import time
from collections.abc import Callable

import torch
from solrl_core.reward_registry import REWARDS
from solrl_core.sampling.batches import CHUNK_SIZE
from solrl_core.sampling.generator import GeneratorOutput
from solrl_engine.backend import AdapterMergeError, Backend, LayerPrecisionError
from solrl_engine.batch_size import AdaptiveBatchSize, DoesNotFitError, free_memory
from solrl_proto.identifiers import Precision
from solrl_proto.models import ModelInfo
from solrl_proto.rollouts import Plan, PromptItem

from solrl_rollout.engine.chunk_scorer import ChunkScorer
from solrl_rollout.engine.work import Chunk, GeneratedChunk, HostedModel, Job
from solrl_rollout.status.rollout_metrics import RolloutMetrics

logger = logging.getLogger(__name__)

SCORING = "rewards"
"""Name of scoring in metrics, where other parts are precisions."""
_UNKNOWN = "unknown"


class ModelRunner:
    """One hosted model. All calls come from the worker's thread; its scorer may run concurrently on another thread."""

    def __init__(
        self,
        name: str,
        backend: Backend,
        scorer: ChunkScorer,
        default_precision: Precision,
        metrics: RolloutMetrics,
    ) -> None:
        self.backend = backend
        self.scorer = scorer
        self._name = name
        self._default_precision = default_precision
        self._metrics = metrics
        scorer.batch = self._adaptive(SCORING, "scoring")
        self._batches = {SCORING: scorer.batch}
        self._served: dict[Precision, str | None] = {}
        """Digest of the adapter that each precision serves; None for the base model."""
        self.hosted = self._describe()

    def generate(
        self, chunk: Chunk, between: Callable[[], None], wait_for_scoring: Callable[[], bool] = lambda: False
    ) -> GeneratedChunk:
        """Generate a chunk's candidates under its adapter.

        Args:
            between: called before each step; raises to stop.
            wait_for_scoring: waits for the chunk being scored, whose memory may be needed; returns whether there was
                one.

        Raises:
            AdapterMergeError: the previous adapter is still served.
            LayerPrecisionError: the model does not run at the precision.
            DoesNotFitError: not even one candidate fits, or the weights do not.
        """
        job, started_at, began = chunk.job, time.monotonic(), self.backend.record_event()
        switched = self._serve_adapter(job, wait_for_scoring)
        merged, request = self.backend.record_event(), chunk.request
        batch = self._batch(job.precision)

        def generate(rows: slice) -> GeneratorOutput:
            return self.backend.generate(request.rows(rows), batch.size, between)

        output = GeneratorOutput.join(batch.run(chunk.candidates, generate, wait_for_scoring))
        return GeneratedChunk(
            chunk=chunk,
            output=output,
            started_at=started_at,
            switched=switched,
            began=began,
            merged=merged,
            finished=self.backend.record_event(),
        )

    def warm_up(self) -> None:
        """Generate and score a chunk, or the most candidates that fit: a device that is too small fails here.

        Runs every batch size of the backend once, so that no request at the default precision without guidance waits
        for compilation. Raises RewardError, torch.OutOfMemoryError, or an error of the backend.
        """
        prompt, judges = PromptItem(id="warm-up", text='"A"'), self.scorer.rewards  # quoted, as ocr wants it
        # Left out: third-party rewards, which may need metadata, rewards of servers, rewards that refuse the prompt.
        rewards = tuple(
            name
            for name in judges.computed_here
            if name in REWARDS.built_in and not judges.first_fault(name, [(prompt.text, prompt.metadata)])
        )
        job = Job("", None, self._name, None, self._default_precision, Plan(steps=1), rewards, images=False)

        def run(count: int) -> None:
            chunk = Chunk(job, prompt, range(count))
            self.scorer.score_here(self.generate(chunk, lambda: None))

        run(CHUNK_SIZE)
        for size in self.backend.batch_sizes(self._batch(job.precision).size)[1:]:
            run(size)

    def _describe(self) -> HostedModel:
        identity, capabilities, rewards = self.backend.identity, self.backend.capabilities, self.scorer.rewards
        info = ModelInfo(
            name=self._name,
            family=identity.family,
            height=identity.height,
            width=identity.width,
            frames=identity.frames,
            latent_shape=identity.latent_shape,
            digests={**identity.digests, **rewards.digests()},
            rewards=rewards.names,
            precisions=capabilities.precisions,
            lora_targets=tuple(identity.adapter_layout),
            pipeline_call=dict(identity.pipeline_call),
        )
        return HostedModel(
            info=info,
            default_precision=self._default_precision,
            adapter_layout=identity.adapter_layout,
            device=identity.device,
            remote_rewards=frozenset(rewards.names) - frozenset(rewards.computed_here),
        )

    def _serve_adapter(self, job: Job, wait_for_scoring: Callable[[], bool]) -> bool:
        """Make the backend serve the job's adapter; returns whether another one was served before."""
        fault = ""
        for attempt in range(2):
            try:
                return self._set_adapter(job)
            except torch.OutOfMemoryError as error:
                fault = str(error)
                logger.warning("%s at %s does not fit into memory: %s", job.model, job.precision, error)
            # Once more after scoring has ended, if there was any.
            waited = not attempt and wait_for_scoring()
            free_memory()
            if not waited:
                break
        raise DoesNotFitError(f"the weights do not fit with everything else that is loaded: {fault}")

    def _set_adapter(self, job: Job) -> bool:
        precision, digest = job.precision, job.adapter.digest if job.adapter else None
        before = self._served.get(precision)
        if digest == before and precision in self._served:
            return False
        # Unknown until the merge has succeeded: after a failed one, the next chunk must merge again.
        self._served[precision] = _UNKNOWN
        try:
            self.backend.set_adapter(precision, job.adapter)
        except AdapterMergeError:
            self._served[precision] = before
            raise
        except LayerPrecisionError:
            del self._served[precision]
            raise
        self._served[precision] = digest
        return digest != before

    def _batch(self, precision: Precision) -> AdaptiveBatchSize:
        if precision not in self._batches:
            self._batches[precision] = self._adaptive(precision, "generating")
        return self._batches[precision]

    def _adaptive(self, part: str, doing: str) -> AdaptiveBatchSize:
        """A batch size whose exhausted memory is logged and counted; `part`: a precision, or `SCORING`."""

        def on_exhausted(text: str) -> None:
            self._metrics.out_of_memory(self._name, part)
            logger.warning(text, extra={"fields": {"model": self._name, "part": part}})

        return AdaptiveBatchSize(doing=doing, on_exhausted=on_exhausted)
