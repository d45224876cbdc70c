"""What the engine thread runs: a model at each precision, the adapter it serves, and the rewards."""

import time
from collections.abc import Callable

import torch
from solrl_core.families import load_backbone
from solrl_core.families.load import locate
from solrl_core.fingerprint import part_digests
from solrl_core.generator import CHUNK, Generator, fastest, numerics, supported
from solrl_core.lora import adapter_layout
from solrl_core.rewards import RewardSet
from solrl_core.rewards.base import Reward, RewardError, known_rewards
from solrl_proto.models import ModelInfo, PrecisionInfo
from solrl_proto.problems import ProblemError

from solrl_rollout.settings import ModelSpec, Settings
from solrl_rollout.work import Chunk, Hosted, Scored, VersionedAdapter

_UNKNOWN = "unknown"


def load(settings: Settings) -> dict[str, "Executor"]:
    """All models of the settings, by the name they are served under; rewards that they share are loaded once.

    Raises:
        ValueError, OSError, RuntimeError: a model or a reward cannot be loaded or does not fit.
    """
    _check_names(settings)
    rewards: dict[str, Reward] = {}
    loaded: dict[str, Executor] = {}
    for spec in settings.models:
        try:
            loaded[spec.name] = Executor(spec, settings, rewards)
        except torch.OutOfMemoryError as error:
            beside = f" beside {', '.join(loaded)}" if loaded else ""
            raise RuntimeError(
                f"{spec.location} does not fit on {settings.device}{beside}: {error}; `solrl-rollout memory --model "
                f"{spec.location}` plans what fits; serve fewer models, at a lower precision, or on a larger GPU"
            ) from error
    return loaded


class Executor:
    """One hosted model: makes chunks. To be used from one thread."""

    def __init__(self, spec: ModelSpec, settings: Settings, rewards: dict[str, Reward]) -> None:
        """Load and warm; `rewards`: what other models have loaded."""
        device = settings.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        token = settings.hf_token.get_secret_value() if settings.hf_token else None
        self._backbone = load_backbone(spec.location, device=device, revision=spec.revision, token=token)
        self._rewards = RewardSet.load(settings.rewards, self._backbone, settings.reward_options, loaded=rewards)
        self._generators: dict[str, Generator] = {}
        self._serving: dict[str, str | None] = {}
        self._default = fastest(self._backbone.device) if settings.precision == "auto" else settings.precision
        warm = self._generator(self._default)
        # A whole chunk, so that a device that is too small is found now.
        warm.generate("a", range(CHUNK), steps=1)
        self.hosted = self._describe(spec.name)

    def execute(self, chunk: Chunk, between: Callable[[], None]) -> Scored:
        """Make and score a chunk's candidates.

        Args:
            chunk: what to make.
            between: called before each step; raise from it to stop.

        Raises:
            ProblemError: 422 `adapter-merge` (the adapter before goes on serving), 500 `reward-failed`.
        """
        job, plan, started = chunk.job, chunk.job.plan, time.monotonic()
        generator = self._generator(job.precision)
        switched = self._serve(job.precision, generator, job.adapter)
        merged = time.monotonic()
        made = generator.generate(
            chunk.prompt.text,
            chunk.seeds,
            steps=plan.steps,
            solver=plan.solver,
            guidance=plan.guidance,
            begin=chunk.begin,
            until=chunk.until,
            between=between,
        )
        pixels = None
        if job.images and chunk.until is None:
            pixels = (made.images * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().contiguous()
        generated = time.monotonic()
        count = len(chunk.seeds)
        try:
            with torch.inference_mode():
                rewards = self._rewards.score(
                    job.rewards, made.images, [chunk.prompt.text] * count, [chunk.prompt.metadata] * count
                )
        except RewardError as error:
            raise ProblemError(
                "reward-failed",
                500,
                "A reward failed",
                str(error),
                where=f"prompts.{chunk.prompt.id}",
                action="check that the prompt's metadata is what the reward needs, or leave the reward out",
            ) from error
        trajectory = made.trajectory if chunk.until is not None else None
        return Scored(
            rewards,
            pixels,
            trajectory,
            started,
            switched=switched,
            switch=merged - started,
            generate=generated - merged,
            reward=time.monotonic() - generated,
        )

    def probe(self) -> None:
        """Raise if the device does not compute any more."""
        torch.ones(1, device=self._backbone.device).sum().item()

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
                "adapter-merge",
                422,
                "Adapter cannot be merged",
                str(error),
                where="adapter",
                got=wanted,
                expected="finite weights after the merge",
                action="use the version before it; look at the training step that made this one",
            ) from error
        self._serving[precision] = wanted
        return True

    def _describe(self, name: str) -> Hosted:
        backbone = self._backbone
        layout = adapter_layout(backbone.transformer, backbone.lora_targets)
        shares = {}
        for tier in supported(backbone.device):
            # Built only to know the share, if it is not the default: a second copy of a large model is not kept.
            shares[tier] = (self._generators.get(tier) or Generator(backbone, tier)).quantized_share
        info = ModelInfo(
            name=name,
            family=backbone.family,
            height=backbone.height,
            width=backbone.width,
            latent_shape=backbone.latent_shape,
            digests=part_digests(backbone.parts) | self._rewards.digests(),
            rewards=self._rewards.names,
            precisions=tuple(
                PrecisionInfo(
                    precision=tier,
                    numerics=numerics(tier, backbone.device),
                    quantized_share=share,
                )
                for tier, share in shares.items()
            ),
            lora_targets=tuple(layout),
        )
        return Hosted(info, self._default, layout, str(backbone.device))


def _check_names(settings: Settings) -> None:
    """Raise a mistyped name's ValueError now, not after a large model was loaded."""
    for spec in settings.models:
        locate(spec.location)
    known = known_rewards()
    for name in settings.rewards:
        if ":" not in name and name not in known:
            raise ValueError(f"got reward {name!r}; expected one of {known}, or package.module:attribute")
