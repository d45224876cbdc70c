"""Runs chunks of a hosted model: sets the adapter, generates, scores, and recovers from exhausted memory."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from solrl_core.families.decoder_fp8 import Fp8DecoderError
from solrl_core.families.early_exit import EarlyDecoderError
from solrl_core.families.load import locate
from solrl_core.generator import CHUNK_SIZE
from solrl_core.rewards.base import AT, REWARDS, Reward
from solrl_core.sampler import Trajectory
from solrl_proto.identifiers import Tier
from solrl_proto.models import ModelInfo
from solrl_proto.problems import ProblemError, ProblemKind, RetryLaterError
from solrl_proto.rollouts import AdapterUse, Plan, PromptItem

from solrl_rollout.engine.backends.base import (
    AdapterMergeError,
    Backend,
    BackendLoader,
    Generation,
    GenerationRequest,
    LayerPrecisionError,
)
from solrl_rollout.engine.batch_limit import BatchLimit, free_memory
from solrl_rollout.engine.problems import (
    adapter_merge,
    early_decoder_mismatch,
    fp8_decoder_unsupported,
    layer_unsupported,
    out_of_memory,
)
from solrl_rollout.engine.scoring import PART, Scorer
from solrl_rollout.engine.work import Chunk, GeneratedChunk, HostedModel, Job
from solrl_rollout.settings import ModelSpec, Settings
from solrl_rollout.status.metrics import Metrics

logger = logging.getLogger(__name__)

_UNKNOWN = "unknown"
_BASE: tuple[None, AdapterUse] = (None, "merged")


def load_models(
    settings: Settings,
    metrics: Metrics,
    load_backend: BackendLoader,
    weights_read: Callable[[], None] = lambda: None,
) -> dict[str, "ModelRunner"]:
    """Load all models of the settings, by name, then warm them up; equal rewards are loaded once.

    Args:
        settings: models, rewards, and their device.
        metrics: metrics to update.
        load_backend: loads each model's backend.
        weights_read: called once all are loaded.

    Raises:
        ValueError, OSError, RuntimeError: a model or a reward cannot be loaded or does not fit.
        ProblemError: `reward-failed`.
    """
    _check_names(settings)
    rewards: dict[str, Reward] = {}
    runners: dict[str, ModelRunner] = {}
    try:
        for spec in settings.models:
            with _fitting(spec, settings, runners):
                runners[spec.name] = _load_model(spec, settings, metrics, load_backend, rewards)
        weights_read()
        for spec in settings.models:
            with _fitting(spec, settings, runners):
                runners[spec.name].warm_up()
    except BaseException:
        for runner in runners.values():
            runner.backend.close()
        raise
    return runners


@contextmanager
def _fitting(spec: ModelSpec, settings: Settings, runners: Mapping[str, "ModelRunner"]) -> Iterator[None]:
    """Say which model does not fit beside which others, if memory runs out within the block."""
    others = [name for name in runners if name != spec.name]
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise _does_not_fit(spec, settings, others, str(error)) from error
    except ProblemError as error:
        if error.problem.kind == ProblemKind.OUT_OF_MEMORY:
            raise _does_not_fit(spec, settings, others, error.problem.detail) from error
        raise


def _load_model(
    spec: ModelSpec, settings: Settings, metrics: Metrics, load_backend: BackendLoader, rewards: dict[str, Reward]
) -> "ModelRunner":
    backend = load_backend(spec, settings)
    try:
        scorer = Scorer.load(spec.name, settings, backend.identity.reward_options, rewards, metrics)
        default = backend.capabilities.fastest if settings.precision == "auto" else settings.precision
        return ModelRunner(spec.name, backend, scorer, default, metrics)
    except BaseException:
        backend.close()
        raise


class ModelRunner:
    """One hosted model. All calls come from the worker's thread; its scorer may run concurrently on another thread."""

    def __init__(self, name: str, backend: Backend, scorer: Scorer, default_precision: Tier, metrics: Metrics) -> None:
        self.backend = backend
        self.scorer = scorer
        self._name = name
        self._default_precision = default_precision
        self._metrics = metrics
        self._limits: dict[str, BatchLimit] = {PART: scorer.limit}
        self._served: dict[Tier, tuple[str | None, AdapterUse]] = {}
        """Digest of the adapter that each precision serves, None for the base model, and its use."""
        self.hosted = self._describe()

    def generate(
        self, chunk: Chunk, between: Callable[[], None], wait_for_scoring: Callable[[], bool] = lambda: False
    ) -> GeneratedChunk:
        """Generate a chunk's candidates under its adapter.

        Args:
            chunk: the candidates.
            between: called before each step; raises to stop.
            wait_for_scoring: waits for the chunk being scored, whose memory may be needed; returns whether there was
                one.

        Raises:
            ProblemError: 422 `adapter-merge` (the previous adapter is still served), `precision-unsupported` or
                `fitted-mismatch`, 503 or 507 `out-of-memory`.
        """
        job, started_at, began = chunk.job, time.monotonic(), self.backend.record_event()
        switched = self._serve_adapter(job, wait_for_scoring)
        merged = self.backend.record_event()
        limit = self._limit(job.precision)

        def generate(rows: slice) -> Generation:
            request = GenerationRequest(
                prompt=chunk.prompt.text,
                seeds=chunk.seeds[rows],
                precision=job.precision,
                plan=job.plan,
                start=chunk.start and chunk.start.rows(rows),
                until=chunk.until,
                batch_limit=limit.size,
            )
            return self.backend.generate(request, between)

        try:
            parts = limit.run(job, chunk.candidates, generate, wait_for_scoring)
        except EarlyDecoderError as error:
            raise early_decoder_mismatch(str(error)) from error
        except Fp8DecoderError as error:
            raise fp8_decoder_unsupported(error) from error
        images = parts[0].images if len(parts) == 1 else torch.cat([part.images for part in parts])
        trajectories = [part.trajectory for part in parts if part.trajectory is not None]
        return GeneratedChunk(
            chunk=chunk,
            images=images,
            trajectory=Trajectory.join(trajectories) if trajectories else None,
            unread_tokens=parts[0].unread_tokens,
            started_at=started_at,
            switched=switched,
            began=began,
            merged=merged,
            finished=self.backend.record_event(),
        )

    def warm_up(self) -> None:
        """Generate and score a chunk, or as many candidates as fit, so that a device that is too small fails here.

        Runs every batch size of the backend once, so that no request at the default precision without guidance waits
        for compilation.

        Raises:
            ProblemError: 507 `out-of-memory` if not even one candidate fits; `precision-unsupported`.
        """
        # Without third-party rewards, which may need metadata, and those of servers.
        rewards = tuple(name for name in self.scorer.rewards.computed_here if REWARDS.is_built_in(name))
        job = Job("", None, self._name, None, self._default_precision, Plan(steps=1), rewards, images=False)

        def run(count: int) -> None:
            chunk = Chunk(job, PromptItem(id="warm-up", text="a"), range(count))
            self.scorer.score(self.generate(chunk, lambda: None))

        while True:
            try:
                run(CHUNK_SIZE)
                for size in self.backend.batch_sizes(self._limit(job.precision).size)[1:]:
                    run(size)
                return
            except RetryLaterError:
                continue  # with smaller batches

    def _describe(self) -> HostedModel:
        identity, capabilities = self.backend.identity, self.backend.capabilities
        info = ModelInfo(
            name=self._name,
            family=identity.family,
            height=identity.height,
            width=identity.width,
            latent_shape=identity.latent_shape,
            digests={**identity.digests, **self.scorer.rewards.digests()},
            rewards=self.scorer.rewards.names,
            reward_dtype=self.scorer.dtype,
            precisions=capabilities.precisions,
            lora_targets=tuple(identity.adapter_layout),
            arithmetic=None if identity.arithmetic is None else dict(identity.arithmetic),
            pipeline_call=dict(identity.pipeline_call),
        )
        return HostedModel(
            info=info,
            default_precision=self._default_precision,
            adapter_layout=identity.adapter_layout,
            prunes=capabilities.prunes,
            device=identity.device,
            batch_limits=self._lowered_limits,
            served_rewards=frozenset(self.scorer.rewards.names) - frozenset(self.scorer.rewards.computed_here),
        )

    def _serve_adapter(self, job: Job, wait_for_scoring: Callable[[], bool]) -> bool:
        """Make the backend serve the job's adapter; returns whether another one was served before."""
        try:
            return self._set_adapter(job)
        except torch.OutOfMemoryError as error:
            logger.warning("%s at %s does not fit into memory: %s", job.model, job.precision, error)
        waited = wait_for_scoring()
        free_memory()
        if waited:
            try:
                return self._set_adapter(job)
            except torch.OutOfMemoryError as error:
                logger.warning("it does not fit after scoring has finished, either: %s", error)
            free_memory()
        raise out_of_memory(job.model, job.precision, None)

    def _set_adapter(self, job: Job) -> bool:
        precision, digest = job.precision, job.adapter.digest if job.adapter else None
        use: AdapterUse = job.plan.adapter if job.adapter else "merged"  # without one, both are the base
        wanted = digest, use
        before = self._served.get(precision, _BASE)
        if wanted == before and precision in self._served:
            return False
        # Unknown until the merge has succeeded: after a failed one, the next chunk must merge again.
        self._served[precision] = _UNKNOWN, use
        try:
            self.backend.set_adapter(precision, job.adapter, use)
        except AdapterMergeError as error:
            self._served[precision] = before
            raise adapter_merge(str(error), digest) from error
        except LayerPrecisionError as error:
            del self._served[precision]
            raise layer_unsupported(str(error), precision) from error
        self._served[precision] = wanted
        return wanted != before

    def _limit(self, precision: Tier) -> BatchLimit:
        return self._limits.setdefault(precision, BatchLimit(self._name, precision, self._metrics))

    def _lowered_limits(self) -> dict[str, int]:
        return {part: limit.size for part, limit in list(self._limits.items()) if limit.size < CHUNK_SIZE}


def _does_not_fit(spec: ModelSpec, settings: Settings, loaded: list[str], fault: str) -> RuntimeError:
    others = f" with {', '.join(loaded)} loaded" if loaded else ""
    return RuntimeError(
        f"{spec.location} does not fit on {settings.device}{others}: {fault}; `solrl-rollout memory --model "
        f"{spec.location}` plans what fits; serve fewer models, at a lower precision, or on a larger GPU"
    )


def _check_names(settings: Settings) -> None:
    """Raise ValueError for a mistyped name before loading a large model."""
    for spec in settings.models:
        locate(spec.location)
    for name in settings.reward_names:
        if AT not in settings.options_of_rewards.get(name, {}):
            REWARDS.check(name)
