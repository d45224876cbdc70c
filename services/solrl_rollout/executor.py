"""What the engine thread runs: the model at each precision, the adapter it serves, and the rewards."""

import time
from collections.abc import Callable

import torch
from solrl_core.families import load_backbone
from solrl_core.families.load import locate
from solrl_core.fingerprint import part_digests
from solrl_core.generator import CHUNK, Generator, fastest, numerics, supported
from solrl_core.lora import adapter_layout
from solrl_core.rewards import RewardSet
from solrl_core.rewards.base import known_rewards
from solrl_proto.models import ModelInfo, PrecisionInfo
from solrl_proto.problems import ProblemError

from solrl_rollout.settings import Settings
from solrl_rollout.work import Chunk, Hosted, Scored, VersionedAdapter

_UNKNOWN = "unknown"


class Executor:
    """Loads the model and makes chunks. To be used from one thread.

    Raises ValueError, OSError or RuntimeError when the model or a reward cannot be loaded or does not fit.
    """

    def __init__(self, settings: Settings) -> None:
        _check_names(settings)
        device = settings.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        token = settings.hf_token.get_secret_value() if settings.hf_token else None
        self._backbone = load_backbone(settings.model, device=device, revision=settings.revision, token=token)
        self._rewards = RewardSet.load(settings.rewards, self._backbone, settings.reward_options)
        self._generators: dict[str, Generator] = {}
        self._serving: dict[str, str | None] = {}
        self._default = fastest(self._backbone.device) if settings.precision == "auto" else settings.precision
        warm = self._generator(self._default)
        # A whole chunk, so that a device that is too small is found now.
        warm.generate("a", range(CHUNK), steps=1)
        self.hosted = self._describe(settings)

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
        self._serve(job.precision, generator, job.adapter)
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
        except RuntimeError as error:
            raise ProblemError(
                "reward-failed",
                500,
                "A reward failed",
                str(error),
                where=f"prompts.{chunk.prompt.id}",
                action="check that the prompt's metadata is what the reward needs, or leave the reward out",
            ) from error
        trajectory = made.trajectory if chunk.until is not None else None
        return Scored(rewards, pixels, trajectory, started, generated - started, time.monotonic() - generated)

    def probe(self) -> None:
        """Raise if the device does not compute any more."""
        torch.ones(1, device=self._backbone.device).sum().item()

    def _generator(self, precision: str) -> Generator:
        if precision not in self._generators:
            self._generators[precision] = Generator(self._backbone, precision)
            self._serving[precision] = None
        return self._generators[precision]

    def _serve(self, precision: str, generator: Generator, adapter: VersionedAdapter | None) -> None:
        wanted = adapter.digest if adapter else None
        before = self._serving[precision]
        if wanted == before:
            return
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

    def _describe(self, settings: Settings) -> Hosted:
        backbone = self._backbone
        layout = adapter_layout(backbone.transformer, backbone.lora_targets)
        shares = {}
        for tier in supported(backbone.device):
            # Built only to know the share, if it is not the default: a second copy of a large model is not kept.
            shares[tier] = (self._generators.get(tier) or Generator(backbone, tier)).quantized_share
        info = ModelInfo(
            name=settings.served_as,
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
    """Fail on a mistyped name now, not after a large model was loaded."""
    locate(settings.model)
    known = known_rewards()
    for name in settings.rewards:
        if ":" not in name and name not in known:
            raise ValueError(f"got reward {name!r}; expected one of {known}, or package.module:attribute")
