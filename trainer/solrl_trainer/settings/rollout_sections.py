"""Sections of a run's settings: size of images, how candidates are explored, and the selected ones regenerated."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from solrl_core.model_options import ImageSize
from solrl_proto.rollouts import FittedSolver, ModelBinding, RequestedPrecision

from solrl_trainer.algorithms.section import Positive, Section, Steps

ExplorationSampler = Literal["ode", "training"]


class GenerateSettings(Section):
    """Size of every image or clip of a run."""

    height: Positive | None = None
    """Height of every image in pixels; null: the model's own. A service needs the same `--height`."""
    width: Positive | None = None
    """Width in pixels; null: the model's own."""
    frames: Positive | None = None
    """Frames of a clip; null: the model's own."""

    @property
    def size(self) -> ImageSize:
        """All of it."""
        return ImageSize(self.height, self.width, self.frames)


class Explore(Section):
    """Candidates of each prompt."""

    source: Literal["model", "images", "pairs"] = "model"
    """model: the model generates candidates. images, pairs: stored ones (docs/images-and-pairs.md), with
    regenerate.at=none; images only with an algorithm that compares no samples, such as sft."""
    prompts: Positive = 48
    """Prompts per iteration."""
    candidates: Annotated[int, Field(ge=2)] = 96
    """Candidates per prompt."""
    keep: Annotated[int, Field(ge=2)] = 24
    """Candidates to select from a group: the best and the worst, half of each."""
    steps: Steps = 6
    """Solver steps of a candidate."""
    precision: RequestedPrecision = "auto"
    """auto: the fastest that is native on the exploring device, and BF16 with regenerate.at=none."""
    fitted: FittedSolver | None = None
    """Steps fitted to the model by `solrl-train calibrate`; null selects the run's solver."""
    sampler: ExplorationSampler = "ode"
    """ode: the run's solver, or the fitted steps. training: the algorithm's own stochastic steps and noise; steps must
    be regenerate.steps."""
    calibrated_for: ModelBinding | None = None
    """Model and settings that `solrl-train calibrate` chose this plan for; any other model or setting is refused."""
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of each rank's prompts that the service explores; `solrl-train layout` computes the best. The trainer's
    device explores the rest, with a copy of the weights at that precision; auto is the fastest native on both."""
    lag: Annotated[int, Field(ge=0)] | None = None
    """Versions that exploration is behind; the service must retain one more. null: 1 with a service, otherwise
    0."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.keep > self.candidates:
            raise ValueError(f"keep is {self.keep}, but there are only {self.candidates} candidates")
        return self


class Regenerate(Section):
    """Regeneration of the selected seeds in BF16."""

    at: Literal["trainer", "none"] = "trainer"
    """trainer: the trainer's device regenerates, under the newest version. none: the candidates are trained on,
    without a service."""
    steps: Steps = 10
    """Solver steps of a sample."""
