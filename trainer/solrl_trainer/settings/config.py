"""Settings of a run, validated when read. Defaults are Sol-RL's released settings; presets adapt them to a model."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from solrl_client.addresses import check_rollout_url
from solrl_core.devices import DeviceName
from solrl_proto.home import with_home
from solrl_proto.identifiers import ModelName, RunName, Seed
from solrl_proto.model_names import default_model_name
from solrl_proto.rollouts import ModelBinding, Plan, PromptItem, RewardSpec, Solver, StochasticSteps

from solrl_trainer.algorithms.algorithm import AlgorithmSettings
from solrl_trainer.algorithms.diffusionnft import DiffusionNftSettings
from solrl_trainer.algorithms.registry import ALGORITHMS, make_algorithm
from solrl_trainer.algorithms.section import Positive, Section
from solrl_trainer.algorithms.training_data import TrainingData
from solrl_trainer.prompts.prompt_rewards import rewards_to_score, run_weights
from solrl_trainer.prompts.prompt_source import PromptSource
from solrl_trainer.settings.evaluate_section import EvaluateSettings, Names
from solrl_trainer.settings.rollout_sections import Explore, GenerateSettings, Regenerate
from solrl_trainer.settings.training_sections import Lora, Optimizer, PolicySettings

_GIVE_URL = "--set rollout_url=http://HOST:8100"
_PLAN_SETTINGS = {
    "steps": "explore.steps",
    "fitted": "explore.fitted",
    "sde": "explore.sampler=training",
    "sde.first": "the first step with noise",
}
"""Field of a plan → its setting, where their names differ."""

MACHINE_SETTINGS = (
    "start_lora",
    "output",
    "rollout_url",
    "served_as",
    "device",
    "patience",
    "reward_options",
    "track",
)
"""Settings that other people do not see: addresses and paths, which may be private."""


def _without_place(prompts: str) -> str:
    """A prompt set without the path of a machine. A folder looks like one, since its name may be registered, too."""
    return f"./{Path(prompts).name}" if "/" in prompts else prompts


class RunConfig(Section):
    """All settings of a run."""

    # The error of a rollout URL must not show a password in it.
    model_config = ConfigDict(hide_input_in_errors=True)

    preset: str
    """Preset that the run began with, `<model>/<recipe>/<reward>`."""
    model: str
    """Registered name, local folder in diffusers format, hub id, or FILE.safetensors+ one of these."""
    revision: str | None = None
    """Hub commit or tag of the model."""
    start_lora: Path | None = None
    """LoRA to start from, of at most rank lora.rank, in the layout of diffusers, PEFT, ComfyUI or kohya. Gains and the
    reference's pull stay relative to the model without it."""
    served_as: ModelName | None = None
    """The model's name at the service, if it was started with --model name=…."""
    rewards: Annotated[dict[str, float], Field(min_length=1)]
    """Reward → weight in the score; with 0 it is only logged. A prompt's field rewards may have other weights."""
    reward_options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Reward → options of its loader: model, checkpoint, processor, dtype, batch_size, device; or at, a server, which
    requests name if the rollout service has not loaded the reward."""
    rollout_url: Annotated[str, AfterValidator(check_rollout_url)] | None = None
    """Address of the rollout service, without a password; null: the trainer's device explores."""
    patience: Annotated[float, Field(ge=0)] = 600.0
    """Seconds to wait for the rollout service, or for a usable answer of a reward server."""
    run: RunName
    """Name of the run, by default model, recipe and trained rewards."""
    output: Path
    """Folder of the run; by default `runs/RUN`."""
    prompts: str | dict[str, PromptSource]
    """Registered prompt set, or a folder with train/test files. Several: set → its share, or {share: …, rewards:
    …}."""
    iterations: Positive = 100
    """Iterations of the run."""
    seed: Seed = 42
    """Seed of prompts, candidates, LoRA weights and training noise."""
    device: DeviceName = "auto"
    """cpu, cuda, cuda:1, …; auto is CUDA if available, otherwise the CPU. Several ranks take no number."""
    batch: Positive = 24
    """Most images that this device generates or scores at once; changes rounding only."""
    guidance: Annotated[float, Field(ge=1, le=30)] = 1.0
    """Guidance scale of every phase, classifier-free or an input of the model; 1 is none."""
    solver: Solver = "euler"
    """Solver of every phase: Euler, or DPM-Solver++ of second order."""
    generate: GenerateSettings = GenerateSettings()
    explore: Explore = Field(default=Explore(), validate_default=True)
    regenerate: Regenerate = Regenerate()
    lora: Lora = Lora()
    optimizer: Optimizer = Optimizer()
    algorithm: SerializeAsAny[AlgorithmSettings] = DiffusionNftSettings()
    policy: PolicySettings = PolicySettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    checkpoint_every: Positive = 1
    """Iterations between checkpoints; evaluated versions and the last always have one."""
    keep_checkpoints: Positive = 2
    """Newest checkpoints to keep, beside the best."""
    track: Names = ()
    """Trackers of the log: tensorboard, wandb, trackio, swanlab (extras of these names), or
    package.module:attribute."""

    @property
    def model_name(self) -> str:
        """The model's name at the service."""
        return self.served_as or default_model_name(self.model)

    @property
    def prompt_sources(self) -> dict[str, PromptSource]:
        return {self.prompts: PromptSource()} if isinstance(self.prompts, str) else self.prompts

    @property
    def shown_prompts(self) -> str | dict[str, PromptSource]:
        """`prompts` without the paths of a machine."""
        if isinstance(self.prompts, str):
            return _without_place(self.prompts)
        return {_without_place(name): source for name, source in self.prompts.items()}

    @property
    def two_stage(self) -> bool:
        """Whether selected seeds are regenerated; otherwise the candidates themselves are trained on."""
        return self.regenerate.at != "none"

    @property
    def sample_steps(self) -> int:
        """Solver steps of a training sample."""
        return self.regenerate.steps if self.two_stage else self.explore.steps

    @property
    def curve_seeds(self) -> int:
        """Images per prompt of the held-out curve; all if nothing is evaluated along the run."""
        seeds = self.evaluate.seeds
        return min(self.evaluate.curve_seeds, seeds) if self._has_curve else seeds

    @property
    def curve_prompts(self) -> int:
        """Prompts of the held-out curve; all if nothing is evaluated along the run."""
        prompts = self.evaluate.prompts
        return min(self.evaluate.curve_prompts or prompts, prompts) if self._has_curve else prompts

    @property
    def _has_curve(self) -> bool:
        return 0 < self.evaluate.every < self.iterations

    @property
    def lag(self) -> int:
        """Versions that exploration is behind training."""
        assert self.explore.lag is not None, "validated"
        return self.explore.lag

    @property
    def uses_service(self) -> bool:
        """Whether a rollout service explores."""
        return self.rollout_url is not None

    @property
    def explores_here(self) -> bool:
        """Whether the trainer's device explores, all prompts or a share."""
        return not self.uses_service or self.explore.share != 1

    @property
    def service_url(self) -> str:
        """Address of the rollout service that explores."""
        assert self.rollout_url is not None, "validated"
        return self.rollout_url

    @property
    def weights(self) -> dict[str, float]:
        """Trained reward → its weight in the score."""
        return run_weights(self.rewards)

    @property
    def shown_weights(self) -> dict[str, float]:
        """Rewards that samples are compared by, for a reader; none if stored images are trained on."""
        return self.weights if self.explore.source == "model" else {}

    @property
    def trained(self) -> tuple[RewardSpec, ...]:
        """Rewards with a weight in the score."""
        return tuple(RewardSpec(name=name, weight=weight) for name, weight in self.weights.items())

    def service_rewards(self, prompts: Iterable[PromptItem] = ()) -> tuple[RewardSpec, ...]:
        """Rewards that the service scores: all with a weight, in the run or for a prompt."""
        named = {name for prompt in prompts for name in rewards_to_score(prompt, self.weights)}
        return tuple(
            RewardSpec(name=name, weight=weight) for name, weight in self.rewards.items() if weight or name in named
        )

    @property
    def training_data(self) -> TrainingData[Any]:
        """Kind of training data of the run's algorithm."""
        data: TrainingData[Any] = make_algorithm(self.algorithm).trains_on
        return data

    def exploration_plan(self, iteration: int) -> Plan:
        """The plan of the candidates that are explored for an iteration.

        Raises:
            ValueError: a plan cannot name the steps of the algorithm's trajectories; a ValidationError, the settings
                make no plan.
        """
        explore = self.explore
        sde: StochasticSteps | None = None
        if explore.sampler == "training":
            solver = self.training_data.solver(self.solver, self.regenerate.steps, iteration, self.seed)
            if not isinstance(solver, StochasticSteps):
                raise ValueError(
                    f"explore.sampler is training, but the samples of {self.algorithm.name} do not take stochastic "
                    "steps that a plan can name; expected explore.sampler=ode"
                )
            sde = solver
        return Plan(
            steps=explore.steps,
            solver=self.solver,
            fitted=explore.fitted,
            sde=sde,
            guidance=self.guidance,
            precision=explore.precision,
        )

    def require_exploring(self, command: str) -> None:
        """Refuse a command about exploration for a run that trains on stored images, by a ValueError."""
        if self.explore.source != "model":
            raise ValueError(
                f"{command} is about candidates, and explore.source={self.explore.source} generates none; expected "
                "explore.source=model"
            )

    @model_validator(mode="before")
    @classmethod
    def _begins_at_home(cls, value: Any) -> Any:
        return with_home(value)

    @field_validator("preset")
    @classmethod
    def _has_three_parts(cls, value: str) -> str:
        if not (value.isprintable() and len(value) <= 200 and value.count("/") == 2):
            raise ValueError("expected <model>/<recipe>/<reward>")
        return value

    @field_validator("explore")
    @classmethod
    def _follows_the_url(cls, value: Explore, info: ValidationInfo) -> Explore:
        """The settings with the lag that null means."""
        served = info.data.get("rollout_url") is not None
        lag = int(served) if value.lag is None else value.lag
        if lag and not served:
            raise ValueError(
                "lag is for exploration at a service; candidates generated here are always current; "
                f"expected explore.lag=0, or a service: {_GIVE_URL}"
            )
        if value.share != 1 and not served:
            raise ValueError(
                f"share is {value.share}, but no service explores; expected explore.share=1, or a service: {_GIVE_URL}"
            )
        return value.model_copy(update={"lag": lag})

    @field_validator("regenerate")
    @classmethod
    def _suits_exploration(cls, value: Regenerate, info: ValidationInfo) -> Regenerate:
        served = info.data.get("rollout_url") is not None
        explore = info.data.get("explore")  # missing if it is invalid itself
        if value.at != "none" and explore is not None and explore.source != "model":
            raise ValueError(
                f"explore.source={explore.source} trains on stored images, which cannot be generated again; expected "
                "regenerate.at=none"
            )
        if value.at == "none" and served:
            raise ValueError(
                "a service answers with scores, not with candidates to train on; "
                "expected at=trainer, or rollout_url=null"
            )
        if value.at == "none" and explore is not None and explore.fitted is not None:
            raise ValueError(
                "explore.fitted generates cheap candidates, and with at=none they are trained on; "
                "expected at=trainer, or explore.fitted=null"
            )
        return value

    @field_validator("optimizer")
    @classmethod
    def _decays_after_the_run(cls, value: Optimizer, info: ValidationInfo) -> Optimizer:
        end, iterations = value.cosine_iterations, info.data.get("iterations", 1)
        if end == "all":
            end = max(iterations, value.warmup_iterations + 1)
            value = value.model_copy(update={"cosine_iterations": end})
        if end is not None and not value.warmup_iterations < end >= iterations:
            raise ValueError(
                f"cosine_iterations is {end}; expected at least {max(iterations, value.warmup_iterations + 1)}, "
                "because the learning rate is 0 from then on; see iterations and optimizer.warmup_iterations"
            )
        return value

    @field_validator("prompts", mode="before")
    @classmethod
    def _share_each(cls, value: Any) -> Any:
        """A number in place of a source's settings is its share."""
        if isinstance(value, str):
            return value
        if not isinstance(value, Mapping) or not value:
            raise ValueError("expected a prompt set, or several with their shares, such as {mine: 0.7, shapes: 0.3}")
        sources = {}
        for name, source in value.items():
            try:
                fields = source if isinstance(source, Mapping | PromptSource) else {"share": source}
                sources[name] = PromptSource.model_validate(fields)
            except ValidationError as error:
                first = error.errors()[0]
                field, message = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
                raise ValueError(f"{field} of {name} is {first['input']!r}; {message}") from error
        return sources

    @field_validator("rewards", mode="before")
    @classmethod
    def _weigh_one(cls, value: Any) -> Any:
        """`rewards=clipscore` and a list of names: each with weight 1."""
        names = [value] if isinstance(value, str) else value
        return (
            dict.fromkeys(names, 1.0) if isinstance(names, list) and all(isinstance(n, str) for n in names) else value
        )

    @field_validator("algorithm", mode="before")
    @classmethod
    def _validate_as_its_algorithms(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return ALGORITHMS.find(str(value.get("name", AlgorithmSettings().name))).Settings.model_validate(value)

    @property
    def bindings(self) -> tuple[ModelBinding, ...]:
        """What the exploration plan and the fitted solver were calibrated for."""
        fitted = self.explore.fitted.fitted_for if self.explore.fitted is not None else None
        return tuple(bound for bound in (self.explore.calibrated_for, fitted) if bound is not None)

    @model_validator(mode="after")
    def _explores_as_calibrated(self) -> Self:
        bound = self.explore.calibrated_for
        if bound is not None and (bound.solver, bound.guidance) != (self.solver, self.guidance):
            raise ValueError(
                f"the exploration plan was calibrated for solver {bound.solver} at guidance {bound.guidance:g}; "
                f"got {self.solver} at guidance {self.guidance:g}; use the plan's, calibrate again, or set "
                "explore.fitted=null and explore.calibrated_for=null"
            )
        return self

    @model_validator(mode="after")
    def _explores_as_it_regenerates(self) -> Self:
        explore, steps = self.explore, self.regenerate.steps
        if explore.sampler == "training" and not self.two_stage:
            raise ValueError(
                "explore.sampler is training, but with regenerate.at=none the candidates are the training samples and "
                "take their steps anyway; expected explore.sampler=ode"
            )
        if explore.sampler == "training" and explore.steps != steps:
            raise ValueError(
                f"explore.steps is {explore.steps} and regenerate.steps {steps} with explore.sampler=training; "
                "expected equal numbers, since the noise belongs to a step"
            )
        return self

    @model_validator(mode="after")
    def _explores_by_a_plan(self) -> Self:
        """The plan checks itself; its error gets the names of the settings."""
        try:
            self.exploration_plan(0)
        except ValidationError as error:
            message = error.errors()[0]["msg"].removeprefix("Value error, ")
            fields = rf"\b({'|'.join(_PLAN_SETTINGS)})(?= is | and |;)"
            message = re.sub(fields, lambda field: _PLAN_SETTINGS[field[0]], message)
            otherwise = "; otherwise set explore.fitted=null" if self.explore.fitted is not None else ""
            raise ValueError(message + otherwise) from error
        return self

    @model_validator(mode="after")
    def _trains_on_what_is_stored(self) -> Self:
        source, name = self.explore.source, self.algorithm.name
        if ALGORITHMS.find(name).compares == (source == "images"):
            reason = "source=images has one image per prompt" if source == "images" else f"{name} compares no samples"
            raise ValueError(
                f"explore.source is {source} with algorithm.name={name}, but {reason}; expected algorithm.name=sft and "
                "explore.source=images, or neither"
            )
        if source != "model" and (self.training_data.recorded or self.algorithm.aggregation != "sum"):
            raise ValueError(
                f"explore.source is {source}, but stored images have neither the steps that {name} may train on nor "
                "rewards to aggregate; expected an algorithm of the forward process, such as dpo, and "
                "algorithm.aggregation=sum"
            )
        return self

    @model_validator(mode="after")
    def _evaluates_its_guards(self) -> Self:
        evaluated = dict.fromkeys((*self.rewards, *self.evaluate.rewards))
        for name in self.evaluate.guards:
            if name not in evaluated:
                raise ValueError(
                    f"evaluate.guards has {name}, which is not evaluated; expected one of {', '.join(evaluated)}: "
                    "add it to evaluate.rewards, or remove it from evaluate.guards"
                )
        return self

    @model_validator(mode="after")
    def _trains_something(self) -> Self:
        if not self.trained:
            raise ValueError("every reward has weight 0; set another weight for at least one")
        if self.algorithm.aggregation == "gdpo" and len(self.trained) < 2:
            raise ValueError(
                "algorithm.aggregation=gdpo normalises each of several trained rewards, and only "
                f"{self.trained[0].name} is trained; expected "
                "algorithm.aggregation=sum, or another reward with a weight"
            )
        return self
