"""What the engine thread runs: a model at each precision, the adapter it serves, and the rewards."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from solrl_core.batches import gpu_batch_sizes
from solrl_core.errors import RewardError
from solrl_core.families import load_backbone
from solrl_core.families.load import locate
from solrl_core.fingerprint import part_digests
from solrl_core.generator import CHUNK, Generated, Generator, fastest_tier, numerics, supported_tiers
from solrl_core.lora import adapter_layout
from solrl_core.pace import Mark, Pace, mark
from solrl_core.precision import probe
from solrl_core.precision.fp8 import require_fp8
from solrl_core.rewards import RewardSet
from solrl_core.rewards.base import REWARDS, Reward
from solrl_core.rewards.images import as_bytes
from solrl_core.sampler import Trajectory
from solrl_proto.models import ModelInfo, PrecisionInfo
from solrl_proto.problems import ProblemError, ProblemKind
from solrl_proto.rollouts import Plan, PromptItem

from solrl_rollout.engine.batch_limit import NoRoomError, Room, free_memory
from solrl_rollout.engine.work import Chunk, Hosted, Job, Scored, VersionedAdapter
from solrl_rollout.http.problems import RetryLaterError, out_of_memory
from solrl_rollout.settings import ModelSpec, Settings
from solrl_rollout.status.metrics import Telemetry

logger = logging.getLogger(__name__)

Part = TypeVar("Part")

_UNKNOWN = "unknown"
_REWARDS = "rewards"


def load(settings: Settings, telemetry: Telemetry) -> dict[str, "Executor"]:
    """All models of the settings, by the name they are served under; rewards that they share are loaded once.

    Raises:
        ValueError, OSError, RuntimeError: a model or a reward cannot be loaded or does not fit.
        ProblemError: `reward-failed`.
    """
    _check_names(settings)
    rewards: dict[str, Reward] = {}
    loaded: dict[str, Executor] = {}
    for spec in settings.models:
        try:
            loaded[spec.name] = Executor(spec, settings, telemetry, rewards)
        except torch.OutOfMemoryError as error:
            raise _does_not_fit(spec, settings, loaded, str(error)) from error
        except ProblemError as error:
            if error.problem.kind == ProblemKind.OUT_OF_MEMORY:
                raise _does_not_fit(spec, settings, loaded, error.problem.detail) from error
            raise
    return loaded


@dataclass(frozen=True)
class Started:
    """A chunk whose candidates the device makes: `made` marks when it has.

    Attributes:
        images: float32 [N, 3, H, W].
        trajectory: where they stand, if they are to go on.
        began: when it was taken up, by `time.monotonic`.
        switched: whether another adapter was served before.
        before, merged: marks before its adapter was merged and after.
    """

    chunk: Chunk
    images: torch.Tensor
    trajectory: Trajectory | None
    began: float
    switched: bool
    before: Mark
    merged: Mark
    made: Mark


class Executor:
    """One hosted model: makes chunks. To be used from one thread, but for `finish`, which may have one of its own."""

    def __init__(self, spec: ModelSpec, settings: Settings, telemetry: Telemetry, rewards: dict[str, Reward]) -> None:
        """Load and warm up; `rewards`: what other models have loaded."""
        self._name = spec.name
        self._telemetry = telemetry
        device = _device(settings)
        token = settings.hf_token.get_secret_value() if settings.hf_token else None
        self._backbone = load_backbone(spec.location, device=device, revision=spec.revision, token=token)
        self._rewards = RewardSet.load(settings.rewards, self._backbone, settings.reward_options, loaded=rewards)
        self.device = self._backbone.device
        self._generators: dict[str, Generator] = {}
        self._serving: dict[str, str | None] = {}
        self._default = fastest_tier(self.device) if settings.precision == "auto" else settings.precision
        self._pace = Pace(lambda: mark(self.device))
        # Before what is asked of other streams: the sooner it is scored, the sooner its memory is free.
        self._stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
        self._rooms: dict[str, Room] = {}
        self._at_once: dict[str, int] = {}
        # Rewards of others may need metadata.
        known = tuple(reward for reward in self._rewards.names if REWARDS.is_built_in(reward))
        job = Job("", None, self._name, None, self._default, Plan(steps=1), known, images=False)
        self._warm_up(job)
        self.hosted = self._describe(spec.name, part_digests(self._backbone.parts))

    def start(self, chunk: Chunk, between: Callable[[], None], settle: Callable[[], bool] = lambda: False) -> Started:
        """Make a chunk's candidates; on a GPU they are only asked for when this returns, but for its last step.

        Args:
            chunk: what to make.
            between: called before each step; raise from it to stop.
            settle: waits for chunks that are being finished, whose memory may be needed; whether there were any.

        Raises:
            ProblemError: 422 `adapter-merge` (the adapter before goes on serving) or `precision-unsupported`,
                503 or 507 `out-of-memory`.
        """
        job, plan, began, before = chunk.job, chunk.job.plan, time.monotonic(), mark(self.device)
        generator, switched = self._serving_generator(job, settle)
        merged = mark(self.device)

        def step() -> None:
            self._pace.step()
            between()

        def make(rows: slice) -> Generated:
            return generator.generate(
                chunk.prompt.text,
                chunk.seeds[rows],
                steps=plan.steps,
                solver=plan.fitted or plan.solver,
                guidance=plan.guidance,
                start=chunk.begin and chunk.begin.rows(rows),
                until=chunk.until,
                between=step,
                batch_limit=self._rooms[job.precision].most,
            )

        parts = self._in_room(job, job.precision, make, chunk.candidates, settle)
        images = parts[0].images if len(parts) == 1 else torch.cat([part.images for part in parts])
        trajectory = Trajectory.join([part.trajectory for part in parts]) if chunk.until is not None else None
        return Started(chunk, images, trajectory, began, switched, before, merged, mark(self.device))

    def finish(self, started: Started) -> Scored:
        """Score a chunk's candidates once they are made. Another thread may start the next chunk meanwhile.

        Raises:
            ProblemError: 500 `reward-failed`, 503 or 507 `out-of-memory`.
        """
        chunk, job = started.chunk, started.chunk.job
        started.made.wait()
        began = time.monotonic()

        @torch.inference_mode()
        def score(rows: slice) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
            images, prompt = started.images[rows], chunk.prompt
            scores = self._rewards.score(
                job.rewards, images, [prompt.text] * len(images), [prompt.metadata] * len(images)
            )
            return scores, as_bytes(images) if job.images and chunk.until is None else None

        try:
            # A stream of its own: what is asked of the one that makes candidates waits for those of the next chunk.
            with torch.cuda.stream(self._stream):
                parts = self._in_room(job, _REWARDS, score, chunk.candidates)
                trajectory = started.trajectory and started.trajectory.to(torch.device("cpu"))
        except RewardError as error:
            raise ProblemError(
                ProblemKind.REWARD_FAILED,
                str(error),
                where=f"prompts.{chunk.prompt.id}",
                action="check that the prompt's metadata is what the reward needs, or leave the reward out",
            ) from error
        pixels = [part for _, part in parts if part is not None]
        return Scored(
            {name: torch.cat([scores[name] for scores, _ in parts]) for name in job.rewards},
            torch.cat(pixels) if pixels else None,
            trajectory,
            started.began,
            switched=started.switched,
            switch=started.merged.since(started.before),
            generate=started.made.since(started.merged),
            reward=time.monotonic() - began,
        )

    def _warm_up(self, job: Job) -> None:
        """Make and score a whole chunk, or as much of one as fits, so that a device that is too small is found now.

        On a GPU batches of both sizes are made, so that no request at the default precision and without guidance
        waits for a compiler.

        Raises:
            ProblemError: 507 `out-of-memory` if not even one candidate fits.
        """

        def walk(count: int) -> None:
            prompt = PromptItem(id="warm-up", text="a")
            self.finish(self.start(Chunk(job, prompt, range(count)), lambda: None))

        while True:
            try:
                walk(CHUNK)
                if self.device.type != "cpu":
                    walk(gpu_batch_sizes(self._rooms[job.precision].most)[1])
                return
            except RetryLaterError:
                continue  # with less at once

    def probe(self) -> None:
        """Raise if the device does not compute any more."""
        torch.ones(1, device=self._backbone.device).sum().item()

    def _serving_generator(self, job: Job, settle: Callable[[], bool]) -> tuple[Generator, bool]:
        """The job's generator with its adapter merged, and whether another one was before."""
        try:
            return self._merged(job)
        except torch.OutOfMemoryError as error:
            logger.warning("%s at %s does not fit into memory: %s", job.model, job.precision, error)
        settled = settle()
        free_memory()
        if settled:
            try:
                return self._merged(job)
            except torch.OutOfMemoryError as error:
                logger.warning("nor with nothing beside it: %s", error)
            free_memory()
        raise out_of_memory(job.model, job.precision, None)

    def _merged(self, job: Job) -> tuple[Generator, bool]:
        """The same; raises torch's OutOfMemoryError where memory runs out."""
        try:
            generator = self._generator(job.precision)
            return generator, self._serve(job.precision, generator, job.adapter)
        except ValueError as error:
            raise ProblemError(
                ProblemKind.PRECISION_UNSUPPORTED,
                str(error),
                where="plan.precision",
                got=job.precision,
                expected="a precision that all layers to be quantised take",
                action="ask for another precision; who serves the model can keep the layer in BF16 (docs/extending)",
            ) from error

    def _in_room(
        self,
        job: Job,
        part: str,
        work: Callable[[slice], Part],
        count: int,
        settle: Callable[[], bool] = lambda: False,
    ) -> list[Part]:
        """`Room.run` in the room of that part; raises `out-of-memory`."""

        def ran_out(at_once: int, said: str, halved: bool) -> None:
            if halved:
                self._at_once[part] = room.most
            self._telemetry.out_of_memory(job.model, part)
            fields = {"model": job.model, "part": part, "run": job.run, "tenant": job.tenant, "at_once": room.most}
            what = f"at most {room.most} are" if halved else "scoring ends before the next are made"
            message = "memory ran out with %d candidates at once; from now on %s: %s"
            logger.warning(message, at_once, what, said, extra={"fields": fields})

        room = self._rooms.setdefault(part, Room())
        try:
            return room.run(work, count, ran_out, settle)
        except NoRoomError as error:
            at_once = error.at_once
        free_memory()
        raise out_of_memory(job.model, job.precision, at_once)

    def _generator(self, precision: str) -> Generator:
        if precision not in self._generators:
            self._generators[precision] = Generator(self._backbone, precision)
            self._serving[precision] = None
        return self._generators[precision]

    def _serve(self, precision: str, generator: Generator, adapter: VersionedAdapter | None) -> bool:
        """Merge the adapter, if another one is; whether it was."""
        wanted = adapter.digest if adapter else None
        before = self._serving[precision]
        if wanted == before:
            return False
        # Unknown until it is done: were the merge to break halfway, the next chunk must merge anew.
        self._serving[precision] = _UNKNOWN
        try:
            generator.set_adapter(adapter.adapter if adapter else None)
        except ValueError as error:
            self._serving[precision] = before
            raise ProblemError(
                ProblemKind.ADAPTER_MERGE,
                str(error),
                where="adapter",
                got=wanted,
                expected="finite weights after the merge",
                action="use the version before it; look at the training step that made this one",
            ) from error
        self._serving[precision] = wanted
        return True

    def _describe(self, name: str, digests: dict[str, str]) -> Hosted:
        backbone = self._backbone
        layout = adapter_layout(backbone.transformer, backbone.lora_targets)
        info = ModelInfo(
            name=name,
            family=backbone.family,
            height=backbone.height,
            width=backbone.width,
            latent_shape=backbone.latent_shape,
            digests=digests | self._rewards.digests(),
            rewards=self._rewards.names,
            precisions=tuple(
                PrecisionInfo(
                    precision=tier,
                    numerics=numerics(tier, backbone.device),
                    how=probe(tier, backbone.device).how,
                    quantized_share=backbone.quantized_share(tier),
                )
                for tier in supported_tiers(backbone.device)
            ),
            lora_targets=tuple(layout),
        )
        return Hosted(info, self._default, layout, str(backbone.device), self._at_once)


def _device(settings: Settings) -> str:
    if settings.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return settings.device


def _does_not_fit(spec: ModelSpec, settings: Settings, loaded: dict[str, Executor], said: str) -> RuntimeError:
    beside = f" beside {', '.join(loaded)}" if loaded else ""
    return RuntimeError(
        f"{spec.location} does not fit on {settings.device}{beside}: {said}; `solrl-rollout memory --model "
        f"{spec.location}` plans what fits; serve fewer models, at a lower precision, or on a larger GPU"
    )


def _check_names(settings: Settings) -> None:
    """Raise the ValueError of a mistyped name, or of a precision that is not here, before a large model is loaded."""
    if settings.precision == "fp8":
        require_fp8(torch.device(_device(settings)))
    for spec in settings.models:
        locate(spec.location)
    for name in settings.rewards:
        REWARDS.check(name)
