"""A rollout request and its answer: prompts and group size in, seeds and proxy rewards out."""

import json
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from solrl_proto.identifiers import Digest, Message, ModelName, RunName, Seed, Tier, Version
from solrl_proto.noise import expand_seeds
from solrl_proto.problems import Problem

STREAM_MEDIA_TYPE = "application/x-ndjson"
"""Ask for it with `Accept` to get a line a group as it is finished."""

MAX_PROMPTS = 256
MAX_CANDIDATES = 4096
MAX_STEPS = 200
MAX_FITTED = 16
MAX_WEIGHT = 1e3
"""Of a fitted solver; larger ones overflow within a few steps."""
MAX_METADATA_BYTES = 16 * 1024
"""Of one prompt's metadata, as JSON."""
MAX_METADATA_DEPTH = 16
"""Objects and lists within one another."""
NOISE_SEED_BITS = 32
"""torch's CPU generator reads this many low bits of a seed."""

Precision = Literal["auto", Tier]
Solver = Literal["euler", "dpm2"]
Images = Literal["none", "png"]


class AdapterRef(Message):
    """An exact adapter version of a run."""

    run: RunName
    version: Version


class PromptItem(Message):
    """One prompt. `metadata` is handed to the rewards as it is (GenEval's, for the verifier)."""

    id: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    text: Annotated[str, StringConstraints(min_length=1, max_length=4096, strip_whitespace=True)]
    metadata: dict[str, Any] = Field(default_factory=dict)

    @field_validator("metadata")
    @classmethod
    def _is_small(cls, value: dict[str, Any]) -> dict[str, Any]:
        if _depth(value) > MAX_METADATA_DEPTH:
            raise ValueError(f"metadata is nested more than {MAX_METADATA_DEPTH} deep; flatten it")
        size = len(json.dumps(value).encode())
        if size > MAX_METADATA_BYTES:
            raise ValueError(f"metadata has {size} bytes as JSON; expected at most {MAX_METADATA_BYTES} per prompt")
        return value


def _depth(value: Any) -> int:
    """Levels of objects and lists, counted no further than `MAX_METADATA_DEPTH` + 1."""
    depth, level = 0, [value]
    while depth <= MAX_METADATA_DEPTH and (nested := [one for one in level if isinstance(one, dict | list)]):
        depth += 1
        level = [item for one in nested for item in (one.values() if isinstance(one, dict) else one)]
    return depth


class Candidates(Message):
    """A prompt group's seeds: `count` of them expanded from `seed_root`, or one explicit list per prompt."""

    count: Annotated[int, Field(ge=1, le=MAX_CANDIDATES)] | None = None
    seed_root: Seed | None = None
    seeds: Annotated[tuple[Annotated[tuple[Seed, ...], Field(min_length=1)], ...], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        expanded = self.count is not None and self.seed_root is not None
        if expanded == (self.seeds is not None) or (self.count is None) != (self.seed_root is None):
            raise ValueError("give either count and seed_root, or seeds (a list for each prompt)")
        if self.seeds is not None:
            if any(len(group) > MAX_CANDIDATES for group in self.seeds):
                raise ValueError(f"at most {MAX_CANDIDATES} seeds a prompt")
            if any(len(set(group)) != len(group) for group in self.seeds):
                raise ValueError("a seed stands twice in one prompt's list; each candidate needs its own")
            if any(len({seed % 2**NOISE_SEED_BITS for seed in group}) != len(group) for group in self.seeds):
                raise ValueError(
                    f"two seeds of one prompt are equal modulo 2**{NOISE_SEED_BITS}; they draw the same noise, "
                    "so they are one candidate: give seeds that differ there"
                )
        return self


class Prune(Message):
    """After step `after`, only the `keep` candidates of a group go on that are most extreme so far.

    They are judged by the score of the clean image as it is predicted then: ⌊keep/2⌋ best, the rest worst.
    """

    after: Annotated[int, Field(ge=1)]
    keep: Annotated[int, Field(ge=2)]


Weights = tuple[Annotated[float, Field(allow_inf_nan=False)], ...]


class ModelBinding(Message):
    """The model and settings that a solver was fitted or a plan was calibrated for; it means nothing elsewhere."""

    model: Digest
    """Over the digests of all parts of the model, as `GET /v1/models` has them, without rewards."""
    solver: Solver
    """The solver whose trajectories were matched."""
    guidance: float


class FittedSolver(Message):
    """A solver fitted to one model, whose few steps end about where many of another solver do.

    Step n starts from the latents x at noise level sigmas[n] and asks the model for the clean latents c_n it predicts.
    moves[n] weighs (x, c_0, …, c_n) into the next latents; ends[n] weighs the same into the clean latents as they can
    be foreseen by then, which pruning looks at, and which after the last step are the candidate.
    """

    sigmas: Annotated[tuple[float, ...], Field(min_length=1, max_length=MAX_FITTED)]
    moves: tuple[Weights, ...]
    ends: tuple[Weights, ...]
    fitted_for: ModelBinding | None = None
    """Requests for another model, solver or guidance are refused. Null is unchecked."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.sigmas[0] != 1 or any(not 0 < later < earlier for earlier, later in pairwise(self.sigmas)):
            raise ValueError(f"sigmas are {list(self.sigmas)}; expected 1.0 first, then ever smaller ones above 0")
        if any(abs(weight) > MAX_WEIGHT for row in (*self.moves, *self.ends) for weight in row):
            raise ValueError(f"a weight is beyond ±{MAX_WEIGHT:g}; weights that were fitted are a few units at most")
        for name, rows, count in (("moves", self.moves, len(self.sigmas) - 1), ("ends", self.ends, len(self.sigmas))):
            found = [len(row) for row in rows]
            if found != list(range(2, count + 2)):
                raise ValueError(
                    f"{name} has rows of {found} weights; expected {list(range(2, count + 2))}: "
                    "one for the latents and one for each prediction so far"
                )
        return self


class Plan(Message):
    """How candidates are made. Sizes default to the model's own."""

    steps: Annotated[int, Field(ge=1, le=MAX_STEPS)] = 6
    prune: Prune | None = None
    solver: Solver = "euler"
    fitted: FittedSolver | None = None
    """In place of `solver`; `steps` are then as many as it was fitted for."""
    guidance: Annotated[float, Field(ge=1.0, le=30.0)] = 1.0
    precision: Precision = "auto"

    @model_validator(mode="after")
    def _steps_are_there(self) -> Self:
        if self.fitted is not None and len(self.fitted.sigmas) != self.steps:
            raise ValueError(f"steps is {self.steps}; expected {len(self.fitted.sigmas)}, as the solver was fitted for")
        bound = self.fitted.fitted_for if self.fitted is not None else None
        if bound is not None and (bound.solver, bound.guidance) != (self.solver, self.guidance):
            raise ValueError(
                f"the solver was fitted for {bound.solver} at guidance {bound.guidance:g}; "
                f"got {self.solver} at guidance {self.guidance:g}"
            )
        if self.prune is not None and self.prune.after >= self.steps:
            raise ValueError(f"prune.after is {self.prune.after}; expected 1 to {self.steps - 1}, less than steps")
        return self


class RewardSpec(Message):
    """A reward by name, and its weight in the score."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0


class RolloutRequest(Message):
    """Body of `POST /v1/rollouts`. An exact version and exact seeds make it repeatable, so a retry needs no key."""

    model: ModelName
    adapter: AdapterRef | None = None
    prompts: Annotated[tuple[PromptItem, ...], Field(min_length=1, max_length=MAX_PROMPTS)]
    candidates: Candidates
    plan: Plan = Plan()
    rewards: Annotated[tuple[RewardSpec, ...], Field(min_length=1, max_length=16)]
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
            raise ValueError(f"seeds holds {len(seeds)} lists for {len(self.prompts)} prompts; give one for each")
        return self

    def groups(self) -> list[tuple[PromptItem, list[int]]]:
        """Each prompt with its group's seeds, expanded if need be."""
        explicit, count, root = self.candidates.seeds, self.candidates.count, self.candidates.seed_root
        if explicit is not None:
            return [(prompt, list(group)) for prompt, group in zip(self.prompts, explicit, strict=True)]
        assert count is not None
        assert root is not None
        return [(prompt, expand_seeds(root, prompt.id, count)) for prompt in self.prompts]


class RolloutGroup(Message):
    """One prompt's candidates, in the order of `seeds`. Every list has the same length.

    A pruned candidate has no score, no rewards and no image: null.
    """

    prompt_id: str
    seeds: tuple[Seed, ...]
    scores: tuple[float | None, ...]
    """Weighted sum of the rewards."""
    rewards: dict[str, tuple[float | None, ...]]
    pruned: tuple[bool, ...] | None = None
    """Which candidates were pruned; null where the plan prunes none."""
    images: tuple[str | None, ...] | None = None
    """Base64 PNGs when asked for."""


class RolloutTimings(Message):
    """Seconds this request waited and was worked on."""

    queued: float
    """Until its first chunk began."""
    switch: float
    """Merging its adapter, when another one was served before."""
    generate: float
    reward: float


class Served(Message):
    """What really made the candidates of an answer."""

    model: ModelName
    adapter: AdapterRef | None
    precision: Tier
    numerics: Literal["native", "emulated"]
    fingerprint: Digest
    """Over the digests of all parts of the model and of the rewards asked for, as `GET /v1/models` has them."""
    plan: Plan


class RolloutAnswer(Served):
    """The answer as one JSON document; groups in the order of the prompts."""

    groups: tuple[RolloutGroup, ...]
    seconds: RolloutTimings


class GroupLine(Message):
    """A line of the answer as NDJSON: a finished group. Groups come in the order in which they are finished."""

    kind: Literal["group"] = "group"
    served: Served
    group: RolloutGroup


class EndLine(Message):
    """The last line of a whole NDJSON answer. An answer without it was cut short: ask again for what is missing."""

    kind: Literal["end"] = "end"
    groups: int
    """How many lines went before."""
    seconds: RolloutTimings


class ErrorLine(Message):
    """The last line of an NDJSON answer that failed on its way. The groups before it hold."""

    kind: Literal["error"] = "error"
    problem: Problem


StreamLine = Annotated[GroupLine | EndLine | ErrorLine, Field(discriminator="kind")]
"""One line of an NDJSON answer."""
