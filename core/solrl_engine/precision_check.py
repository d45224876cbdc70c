"""How well a precision ranks: candidates of a served plan at that precision, against BF16 with all steps.

Errors of single layers miss outliers, and random inputs have none. So candidates are generated as a service does it,
decoded and scored, and the ranks of their scores are compared.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.fidelity import RankCorrelation, correlation, rank_fidelity
from solrl_core.precision.layer_policy import apply_policy
from solrl_core.precision.layers import QuantLinear, QuantPointwiseConv
from solrl_core.precision.support import probe
from solrl_core.rewards import RewardSet
from solrl_core.sampling.generator import Generator, GeneratorOutput
from solrl_proto.identifiers import Precision
from solrl_proto.rollouts import Plan, PromptItem
from torch import Tensor

from solrl_engine.batch_size import AdaptiveBatchSize
from solrl_engine.sampler import Sampler
from solrl_engine.scorer import Scorer

_ONE_COLOUR = 2 / 255
"""Range of the pixels, in [0, 1], of an image that shows nothing."""
_COLOURS = ("red", "blue", "green", "yellow", "purple", "cyan")
_SHAPES = ("circle", "square", "triangle", "circle")

PROMPTS = tuple(
    PromptItem(id=f"{colour}-{index}", text=f"a {colour} {shape} to the left of a {neighbour} {_SHAPES[index - 1]}")
    for index, shape in enumerate(_SHAPES)
    for colour, neighbour in zip(_COLOURS, (*_COLOURS[index + 1 :], *_COLOURS[: index + 1]), strict=True)
)
"""Prompts that every model of text to image understands, the miniatures too."""
FLOOR = 0.6
"""Least Spearman correlation of a trusted precision."""


def generator_at(backbone: PipelineBackbone, precision: str) -> Generator:
    """A generator of the base at a precision; FP8 is emulated where the device has no FP8 units.

    Raises:
        ValueError: the model does not run at this precision.
    """
    if precision != "fp8" or probe("fp8", backbone.device).numerics is not None:
        return Generator(backbone, precision)
    generator = Generator(backbone, "bf16")
    for name in apply_policy(generator.transformer, backbone.policy_at("fp8"), "fp8 emulated", backbone.device):
        layer, clean = (model.get_submodule(name) for model in (generator.transformer, backbone.transformer))
        assert isinstance(layer, QuantLinear | QuantPointwiseConv)
        layer.refresh_(clean.get_parameter("weight").detach().float())
    generator.precision, generator.numerics = "fp8", "emulated"
    return generator


@dataclass(frozen=True)
class Measured:
    """Candidates of the plan at a precision, against the reference.

    Attributes:
        precision: precision of the transformer.
        numerics: "native" or "emulated".
        spearman: reward → rank correlation with the reference.
        best, worst: reward → mean rank in the reference, from 1, of the candidate that scores best, and worst.
        latent_error: root mean square of the difference to BF16's clean latents by the same plan, over that of BF16's.
        image_error: mean absolute difference to BF16's images by the same plan, of pixels in [0, 1].
        unusable: share of the candidates whose image is not finite, or shows one colour.
        step_seconds: seconds of a step of one candidate, its share of decoding included.
    """

    precision: Precision
    numerics: str
    spearman: Mapping[str, RankCorrelation]
    best: Mapping[str, float]
    worst: Mapping[str, float]
    latent_error: float
    image_error: float
    unusable: float
    step_seconds: float

    @property
    def ranks(self) -> bool | None:
        """Whether every reward's interval is at or above `FLOOR`; False if one is below it, None if neither is sure.

        Rewards that rank nothing in the reference do not count. If no reward does, the answer is None.
        """
        counted = [correlation for correlation in self.spearman.values() if correlation.groups]
        if any(correlation.high < FLOOR for correlation in counted):
            return False
        return True if counted and all(correlation.low >= FLOOR for correlation in counted) else None


@dataclass
class PrecisionCheck:
    """Precisions of one loaded model, compared on the same prompts and seeds.

    Attributes:
        candidates: number of candidates of each prompt; there is at least one prompt.
        plan: plan that is served.
        true_steps: solver steps of the reference, in BF16.
        batch: largest number of candidates that are generated at once.
        images: precision → images [N, 3, H, W] of the first prompt's candidates, of what was measured.
        true: reward → scores [N] of each prompt's candidates in the reference; measured when this is built.
        bf16: BF16 by the plan; measured when this is built.
    """

    backbone: PipelineBackbone
    rewards: RewardSet
    prompts: Sequence[PromptItem]
    candidates: int
    plan: Plan
    true_steps: int
    batch: AdaptiveBatchSize = field(default_factory=AdaptiveBatchSize)
    images: dict[str, Tensor] = field(default_factory=dict)
    true: dict[str, list[Tensor]] = field(init=False)
    bf16: Measured = field(init=False)

    def __post_init__(self) -> None:
        self._scorer = Scorer(self.rewards)
        self._exact: list[GeneratorOutput] = []
        generator = generator_at(self.backbone, "bf16")
        exact_plan = self.plan.model_copy(update={"steps": self.true_steps, "fitted": None})
        self.true = self._scores(self._generate(generator, exact_plan))
        self.bf16 = self._measure("bf16", generator)

    def measure(self, precision: Precision) -> Measured:
        """Compare a precision with the reference.

        Raises:
            ValueError: the model does not run at this precision.
        """
        return self.bf16 if precision == "bf16" else self._measure(precision, generator_at(self.backbone, precision))

    def _measure(self, precision: Precision, generator: Generator) -> Measured:
        self._group(generator, self.plan, self.prompts[0], 1)  # warms up
        began = time.perf_counter()
        groups = self._generate(generator, self.plan)
        seconds = time.perf_counter() - began
        self._exact = self._exact or groups
        self.images[precision] = groups[0].images
        scores = self._scores(groups)
        latents, images = (
            [(_finite(getattr(a, name)), getattr(b, name)) for a, b in zip(groups, self._exact, strict=True)]
            for name in ("latents", "images")
        )
        ranked = {
            name: rank_fidelity(torch.stack(scores[name]), torch.stack(self.true[name]), keep=2) for name in scores
        }
        correlated = {
            name: [correlation(proxy, true) for true, proxy in zip(self.true[name], scores[name], strict=True)]
            for name in scores
        }
        return Measured(
            precision=precision,
            numerics=generator.numerics,
            spearman={name: RankCorrelation.over(correlations) for name, correlations in correlated.items()},
            best={name: fidelity.top_rank for name, fidelity in ranked.items()},
            worst={name: fidelity.bottom_rank for name, fidelity in ranked.items()},
            latent_error=float(np.mean([_relative(latent, exact) for latent, exact in latents])),
            image_error=float(np.mean([float((image - exact).abs().mean()) for image, exact in images])),
            unusable=float(torch.cat([_unusable(group.images) for group in groups]).double().mean()),
            step_seconds=seconds / (len(self.prompts) * self.candidates * self.plan.steps),
        )

    def _generate(self, generator: Generator, plan: Plan) -> list[GeneratorOutput]:
        return [self._group(generator, plan, prompt, self.candidates) for prompt in self.prompts]

    def _group(self, generator: Generator, plan: Plan, prompt: PromptItem, count: int) -> GeneratorOutput:
        return Sampler(generator, lambda: plan, batch=self.batch).sample([prompt] * count, range(count))

    def _scores(self, groups: Sequence[GeneratorOutput]) -> dict[str, list[Tensor]]:
        """Scores of each group by reward; an image that is not finite gets a black image's scores."""
        scores: dict[str, list[Tensor]] = {name: [] for name in self.rewards.names}
        for prompt, group in zip(self.prompts, groups, strict=True):
            scored, _ = self._scorer.score(self.rewards.names, _finite(group.images), [prompt] * len(group.images))
            for name in scores:
                scores[name].append(scored[name])
        return scores


def _finite(values: Tensor) -> Tensor:
    return values.nan_to_num(0.0, 0.0, 0.0)


def _unusable(images: Tensor) -> Tensor:
    """Whether each image [N, 3, H, W] or clip [N, F, 3, H, W] is not finite, or shows one colour."""
    flat = images.flatten(-2).flatten(1, -2)
    return ~flat.isfinite().all(2).all(1) | ((flat.amax(2) - flat.amin(2)).amax(1) < _ONE_COLOUR)


def _relative(result: Tensor, exact: Tensor) -> float:
    return float((result - exact).square().mean().sqrt() / exact.square().mean().sqrt())
