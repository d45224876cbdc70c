"""A rollout request and its answer: prompts and group size in, seeds and proxy rewards out."""

import json
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from solrl_proto.identifiers import Digest, Message, ModelName, Precision, RunName, Seed, Version
from solrl_proto.models import Numerics
from solrl_proto.noise import NOISE_SEED_BITS, expand_seeds
from solrl_proto.problems import Problem
from solrl_proto.selection import best_worst

STREAM_MEDIA_TYPE = "application/x-ndjson"
"""Media type for `Accept`, to get one line per group as each is finished."""

MAX_PROMPTS = 256
MAX_CANDIDATES = 4096
MAX_STEPS = 200
MAX_FITTED = 16
MAX_WEIGHT = 1e3
"""Largest weight of a fitted solver; larger weights overflow within a few steps."""
MAX_ETA = 10.0
"""Largest level of stochastic steps. Papers use at most 1; larger levels overflow within some steps."""
MAX_METADATA_BYTES = 16 * 1024
"""Size of one prompt's metadata as JSON."""
MAX_METADATA_DEPTH = 16
"""Levels of objects and lists."""

RequestedPrecision = Literal["auto", Precision]
Solver = Literal["euler", "dpm2"]
Images = Literal["none", "png", "webp"]
SdeKind = Literal["flow", "dance", "cps"]
Eta = Annotated[float, Field(gt=0, le=MAX_ETA)]
"""Level η of a stochastic solver's noise."""


class AdapterRef(Message):
    """An exact adapter version of a run."""

    run: RunName
    version: Version


def _small(value: dict[str, Any]) -> dict[str, Any]:
    level: list[Any] = [value]
    for _ in range(MAX_METADATA_DEPTH + 1):
        nested = [node for node in level if isinstance(node, dict | list)]
        level = [child for node in nested for child in (node.values() if isinstance(node, dict) else node)]
    if nested:
        raise ValueError(f"metadata is nested more than {MAX_METADATA_DEPTH} deep; flatten it")
    try:
        size = len(json.dumps(value, allow_nan=False).encode())
    except ValueError as error:
        raise ValueError("metadata has NaN or Infinity, which JSON lacks; expected finite numbers, or null") from error
    if size > MAX_METADATA_BYTES:
        raise ValueError(f"metadata has {size} bytes as JSON; expected at most {MAX_METADATA_BYTES} per prompt")
    return value


Metadata = Annotated[dict[str, Any], AfterValidator(_small)]
"""The rest of a prompt's line, for rewards that read it."""


class PromptItem(Message):
    """One prompt. `metadata` is passed to the rewards unchanged (GenEval's, for the verifier)."""

    id: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    text: Annotated[str, StringConstraints(min_length=1, max_length=4096, strip_whitespace=True)]
    metadata: Metadata = Field(default_factory=dict)


Group = Annotated[tuple[Seed, ...], Field(min_length=1, fail_fast=True)]
"""Seeds of one prompt's candidates."""


class Candidates(Message):
    """The seeds of each group: `count` seeds expanded from `seed_root`, or one explicit list per prompt."""

    count: Annotated[int, Field(ge=1, le=MAX_CANDIDATES)] | None = None
    seed_root: Seed | None = None
    seeds: Annotated[tuple[Group, ...], Field(min_length=1, fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        expanded = self.count is not None and self.seed_root is not None
        if expanded == (self.seeds is not None) or (self.count is None) != (self.seed_root is None):
            raise ValueError("give either count and seed_root, or seeds (a list for each prompt)")
        if self.seeds is not None:
            if any(len(group) > MAX_CANDIDATES for group in self.seeds):
                raise ValueError(f"at most {MAX_CANDIDATES} seeds a prompt")
            if any(len(set(group)) != len(group) for group in self.seeds):
                raise ValueError("a seed is repeated in one prompt's list; each candidate needs its own")
            if any(len({seed % 2**NOISE_SEED_BITS for seed in group}) != len(group) for group in self.seeds):
                raise ValueError(
                    f"two seeds of one prompt are equal modulo 2**{NOISE_SEED_BITS}; they draw the same noise, "
                    "so they are one candidate: give seeds that differ in those bits"
                )
        return self


Weights = Annotated[tuple[Annotated[float, Field(allow_inf_nan=False)], ...], Field(fail_fast=True)]


class ModelBinding(Message):
    """The model and settings that a solver was fitted or a plan was calibrated for; both are meaningless elsewhere."""

    model: Digest
    """Digest over the digests of all parts of the model, as in `GET /v1/models`, without rewards."""
    solver: Solver
    """The solver whose trajectories were matched."""
    guidance: float


class FittedSolver(Message):
    """A solver fitted to one model: its few steps end about where many steps of another solver do.

    Step n has latents x at noise level sigmas[n], and the model predicts clean latents c_n. The sum of
    (x, c_0, …, c_n), weighted by step_coeffs[n], is the next latents. Weighted by x0_coeffs[n], it estimates the final
    latents: at the last step, the candidate.
    """

    sigmas: Annotated[tuple[float, ...], Field(min_length=1, max_length=MAX_FITTED, fail_fast=True)]
    step_coeffs: Annotated[tuple[Weights, ...], Field(fail_fast=True)]
    x0_coeffs: Annotated[tuple[Weights, ...], Field(fail_fast=True)]
    fitted_for: ModelBinding | None = None
    """Requests for another model, solver or guidance are refused. Null is unchecked."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.sigmas[0] != 1 or any(not 0 < later < earlier for earlier, later in pairwise(self.sigmas)):
            raise ValueError(f"sigmas are {list(self.sigmas)}; expected 1.0 first, then decreasing values above 0")
        if any(abs(weight) > MAX_WEIGHT for row in (*self.step_coeffs, *self.x0_coeffs) for weight in row):
            raise ValueError(f"a weight is beyond ±{MAX_WEIGHT:g}; fitted weights are a few units at most")
        for name, missing in (("step_coeffs", 1), ("x0_coeffs", 0)):
            count = len(self.sigmas) - missing
            lengths = [len(row) for row in getattr(self, name)]
            if lengths != list(range(2, count + 2)):
                raise ValueError(
                    f"{name} has rows of {lengths} weights; expected {list(range(2, count + 2))}: "
                    "one for the latents and one for each prediction so far"
                )
        return self


def check_eta(kind: SdeKind, eta: float) -> None:
    """ValueError for a level that steps of this kind cannot have."""
    if kind == "cps" and eta > 1:
        raise ValueError(f"eta is {eta:g} for steps of kind cps; expected at most 1, where all predicted noise is new")


class StochasticSteps(Message):
    """Steps with noise; steps without noise are Euler's.

    The noise of a step depends on the candidate's seed and the step's index alone. So a seed has the same noise at
    every precision, in plans of equally many steps.
    """

    kind: SdeKind
    """flow, dance: steps of a stochastic differential equation with the ODE's marginal distributions. Its diffusion
    coefficient s at noise level σ is η·√(σ / (1 − σ)), as in FlowGRPO, or η, as in DanceGRPO. cps:
    coefficients-preserving sampling, where η is at most 1: the share sin(η·π/2) of the predicted noise is new."""
    eta: Eta
    first: Annotated[int, Field(ge=0, lt=MAX_STEPS)] = 0
    """Index of the first noisy step."""
    count: Annotated[int, Field(ge=1)] | None = None
    """Noisy steps from `first` on; null: all. The last step of a plan never has noise."""

    @model_validator(mode="after")
    def _has_a_level(self) -> Self:
        check_eta(self.kind, self.eta)
        return self


class Plan(Message):
    """The settings of generation. Image sizes are the model's own."""

    steps: Annotated[int, Field(ge=1, le=MAX_STEPS)] = 6
    solver: Solver = "euler"
    fitted: FittedSolver | None = None
    """Replaces `solver`; `steps` must be the number that it was fitted for."""
    sde: Annotated[StochasticSteps | None, Field(exclude_if=lambda value: value is None)] = None
    """Replaces `solver`, for candidates that rank as the stochastic trajectories of an algorithm. Absent if null."""
    guidance: Annotated[float, Field(ge=1.0, le=30.0)] = 1.0
    precision: RequestedPrecision = "auto"

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.fitted is not None and len(self.fitted.sigmas) != self.steps:
            raise ValueError(f"steps is {self.steps}; expected {len(self.fitted.sigmas)}, as the solver was fitted for")
        bound = self.fitted.fitted_for if self.fitted is not None else None
        if bound is not None and (bound.solver, bound.guidance) != (self.solver, self.guidance):
            raise ValueError(
                f"the solver was fitted for {bound.solver} at guidance {bound.guidance:g}; "
                f"got {self.solver} at guidance {self.guidance:g}"
            )
        if self.sde is not None and self.fitted is not None:
            raise ValueError("got both fitted and sde; expected one of them, since each replaces the solver")
        if self.sde is not None and self.sde.first > self.steps - 2:
            raise ValueError(
                f"sde.first is {self.sde.first} of {self.steps} steps; expected at most {self.steps - 2}, "
                "or more steps: the last one never has noise"
            )
        return self

    @property
    def solver_spec(self) -> Solver | FittedSolver | StochasticSteps:
        """The solver that takes the steps: the stochastic or fitted one, if there is one."""
        return self.sde or self.fitted or self.solver


class RewardSpec(Message):
    """A reward by name, and its weight in the score. With `at`, it is a reward that the run brings."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    at: Annotated[
        Annotated[str, StringConstraints(max_length=512)] | None, Field(exclude_if=lambda value: value is None)
    ] = None
    """Address of the run's own reward server, one of `reward_hosts` in `GET /v1/models`; null for a reward that the
    service has loaded. Absent if null."""
    digest: Annotated[Digest | None, Field(exclude_if=lambda value: value is None)] = None
    """Digest that the reward at `at` must have; null accepts any, which the fingerprint then leaves out. Absent if
    null."""

    @model_validator(mode="after")
    def _digest_is_of_a_server(self) -> Self:
        if self.digest is not None and self.at is None:
            raise ValueError("got a digest without at; expected both; GET /v1/models has the digests of loaded rewards")
        return self


class RolloutRequest(Message):
    """Body of `POST /v1/rollouts`. Its exact version and seeds make it repeatable, so a retry needs no key."""

    model: ModelName
    adapter: AdapterRef | None = None
    prompts: Annotated[tuple[PromptItem, ...], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    candidates: Candidates
    plan: Plan = Plan()
    rewards: Annotated[tuple[RewardSpec, ...], Field(min_length=1, max_length=16, fail_fast=True)]
    images: Images = "none"

    @model_validator(mode="after")
    def _groups_fit_prompts(self) -> Self:
        ids = [prompt.id for prompt in self.prompts]
        if len(set(ids)) != len(ids):
            raise ValueError("two prompts share an id; ids must differ within a request")
        names = [reward.name for reward in self.rewards]
        if len(set(names)) != len(names):
            raise ValueError("a reward is named twice")
        seeds = self.candidates.seeds
        if seeds is not None and len(seeds) != len(self.prompts):
            raise ValueError(f"seeds has {len(seeds)} lists for {len(self.prompts)} prompts; expected one per prompt")
        return self

    def groups(self) -> list[tuple[PromptItem, list[int]]]:
        """(prompt, seeds of its group) for each prompt; seeds are expanded from the root unless they are explicit."""
        explicit, count, root = self.candidates.seeds, self.candidates.count, self.candidates.seed_root
        if explicit is not None:
            return [(prompt, list(group)) for prompt, group in zip(self.prompts, explicit, strict=True)]
        assert count is not None
        assert root is not None
        return [(prompt, expand_seeds(root, prompt.id, count)) for prompt in self.prompts]


class RolloutGroup(Message):
    """The candidates of one prompt, in the order of `seeds`. All lists have the same length."""

    kind: Literal["group"] = "group"
    prompt_id: str
    seeds: tuple[Seed, ...]
    scores: tuple[float, ...]
    """Weighted sum of the rewards."""
    rewards: dict[str, tuple[float, ...]]
    images: tuple[str, ...] | None = None
    """Base64 PNGs of images, or animated WebPs of clips, both lossless, if requested."""

    def best_worst(self, count: int) -> list[int]:
        """Seeds of the ⌊count/2⌋ best and the remaining worst candidates, from the best to the worst.

        Raises:
            ValueError: count is below 2, or above the number of candidates.
        """
        return [self.seeds[place] for place in best_worst(self.scores, count)]


ServerName = Annotated[str, StringConstraints(max_length=512)]
"""Host and port."""


class RewardTime(Message):
    """Time that a reward took, and where."""

    seconds: Annotated[float, Field(ge=0, le=1e12)]
    server: Annotated[ServerName | None, Field(exclude_if=lambda value: value is None)] = None
    """The reward server that computed it; absent if the service itself did."""


class RolloutTimings(Message):
    """Seconds that a request waited and was worked on."""

    queued: float
    """Until its first chunk started."""
    switch: float
    """Merging its adapter, if another one was merged before."""
    generate: float
    reward: float
    rewards: dict[str, RewardTime] = Field(default_factory=dict)
    """The part of `reward` that each reward took, by name."""


class Served(Message):
    """The model, adapter, precision and plan that actually produced an answer."""

    model: ModelName
    adapter: AdapterRef | None
    precision: Precision
    numerics: Numerics
    fingerprint: Digest
    """Digest over the digests of all parts of the model and of the requested rewards, as in `GET /v1/models`, or in the
    request for rewards with `at`."""
    plan: Plan


class RolloutAnswer(Served):
    """An answer as one JSON document, with the groups in the order of the prompts."""

    groups: tuple[RolloutGroup, ...]
    seconds: RolloutTimings


class StartLine(Message):
    """The first line of an NDJSON answer, sent before the first group is finished."""

    kind: Literal["start"] = "start"
    served: Served
    """What served all groups."""


class EndLine(Message):
    """The last line of a complete NDJSON answer. Without it the answer was cut short: ask again for missing groups."""

    kind: Literal["end"] = "end"
    groups: int
    """Number of group lines before it."""
    seconds: RolloutTimings


class ErrorLine(Message):
    """The last line of an NDJSON answer that failed. The groups before it are valid."""

    kind: Literal["error"] = "error"
    problem: Problem


StreamLine = Annotated[StartLine | RolloutGroup | EndLine | ErrorLine, Field(discriminator="kind")]
"""One line of an NDJSON answer. Groups arrive in the order that they finish in."""
