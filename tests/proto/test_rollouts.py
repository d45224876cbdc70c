"""Rollout requests: their limits, and combinations that are refused."""

from typing import Any

import pytest
from pydantic import ValidationError
from solrl_proto.noise import expand_seeds
from solrl_proto.rollouts import (
    MAX_CANDIDATES,
    MAX_METADATA_BYTES,
    MAX_METADATA_DEPTH,
    Candidates,
    FittedSolver,
    ModelBinding,
    Plan,
    PromptItem,
    RolloutGroup,
    RolloutRequest,
    StochasticSteps,
)

SDE = StochasticSteps(kind="flow", eta=0.7, first=1, count=2)
FITTED = FittedSolver(sigmas=(1.0, 0.5), step_coeffs=((0.5, 0.5),), x0_coeffs=((0.0, 1.0), (0.0, 0.0, 1.0)))


def nested(depth: int) -> dict[str, Any]:
    """An object that holds `depth` levels, itself counted."""
    value: dict[str, Any] = {}
    for _ in range(depth - 1):
        value = {"a": [value]} if depth % 2 else {"a": value}
    return value


def test_metadata_may_be_as_large_and_as_deep_as_the_limits() -> None:
    frame = len('{"a": ""}')
    PromptItem(id="p", text="a", metadata={"a": "x" * (MAX_METADATA_BYTES - frame)})
    PromptItem(id="p", text="a", metadata=nested(MAX_METADATA_DEPTH))
    refused = [
        ({"a": "x" * (MAX_METADATA_BYTES - frame + 1)}, f"{MAX_METADATA_BYTES + 1} bytes as JSON; expected at most"),
        ({"a": "é" * (MAX_METADATA_BYTES // 2)}, "bytes as JSON"),  # on the wire
        (nested(MAX_METADATA_DEPTH + 2), "nested more than"),
        (nested(100_000), "nested more than"),  # without recursion
    ]
    for metadata, said in refused:
        with pytest.raises(ValidationError, match=said):
            PromptItem(id="p", text="a", metadata=metadata)


TWO_WAYS = "give either count and seed_root, or seeds"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        *((fields, TWO_WAYS) for fields in ({}, {"count": 4}, {"seed_root": 7})),
        ({"count": 4, "seed_root": 7, "seeds": ((1,),)}, TWO_WAYS),
        ({"count": 4, "seeds": ((1,),)}, TWO_WAYS),
        ({"seed_root": 7, "seeds": ((1,),)}, TWO_WAYS),
        ({"seeds": ((1, 2), (3, 3))}, "a seed is repeated in one prompt's list"),
        ({"seeds": (tuple(range(MAX_CANDIDATES + 1)),)}, f"at most {MAX_CANDIDATES} seeds a prompt"),
        ({"seeds": ((2**53,),)}, "less than"),
        ({"count": MAX_CANDIDATES + 1, "seed_root": 1}, f"less than or equal to {MAX_CANDIDATES}"),
        *(({"seeds": ((5, 5 + offset),)}, r"equal modulo 2\*\*32") for offset in (2**32, 2**40, 2**52)),
    ],
)
def test_seeds_are_given_in_one_way_within_bounds_and_differ_in_noise(fields: dict[str, Any], said: str) -> None:
    assert Candidates(seeds=((5, 6), (5 + 2**32, 7))).seeds is not None, "groups may share noise"
    with pytest.raises(ValidationError, match=said):
        Candidates(**fields)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sigmas": (0.9, 0.5)}, "expected 1.0 first"),
        ({"sigmas": (1.0, 1.0)}, "decreasing values"),
        ({"step_coeffs": ((0.0, 1e7),)}, r"a weight is beyond"),
        ({"step_coeffs": ()}, r"step_coeffs has rows of \[\] weights; expected \[2\]"),
        ({"x0_coeffs": ((0.0, 1.0), (0.0, 1.0))}, r"x0_coeffs has rows of \[2, 2\] weights; expected \[2, 3\]"),
        ({"x0_coeffs": ((0.0, 1.0), (0.0, float("nan"), 1.0))}, "finite"),
    ],
)
def test_a_solver_that_does_not_fit_together_is_refused(change: dict[str, object], said: str) -> None:
    whole = FITTED.model_dump()
    assert FittedSolver.model_validate(whole) == FITTED
    with pytest.raises(ValidationError, match=said):
        FittedSolver.model_validate(whole | change)


BOUND = FITTED.model_copy(update={"fitted_for": ModelBinding(model="sha256:" + "0" * 64, solver="euler", guidance=1.0)})


def test_a_plan_names_what_takes_its_steps() -> None:
    assert Plan(solver="dpm2").solver_spec == "dpm2"
    assert Plan(steps=2, fitted=FITTED).solver_spec == Plan(steps=2, fitted=FITTED).fitted == FITTED
    assert Plan(steps=2, fitted=BOUND).fitted == BOUND
    assert Plan(steps=3, solver="dpm2", sde=SDE).solver_spec == SDE
    assert "sde" not in Plan().model_dump(mode="json")
    assert Plan.model_validate_json(Plan(steps=3, sde=SDE).model_dump_json()).sde == SDE


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "cps", "eta": 1.1}, "eta is 1.1 for steps of kind cps; expected at most 1"),
        ({"eta": 0.0}, "greater than 0"),
        ({"eta": float("nan")}, "less than or equal to 10"),
    ],
)
def test_impossible_stochastic_steps_are_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        StochasticSteps.model_validate(SDE.model_dump() | change)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"steps": 6, "fitted": FITTED}, "steps is 6; expected 2, as the solver was fitted for"),
        ({"steps": 2, "fitted": BOUND, "solver": "dpm2"}, "the solver was fitted for euler at guidance 1; got"),
        ({"steps": 2, "fitted": BOUND, "guidance": 2.0}, "the solver was fitted for euler at guidance 1; got"),
        ({"steps": 2, "fitted": FITTED, "sde": StochasticSteps(kind="dance", eta=0.3)}, "got both fitted and sde"),
        ({"steps": 1, "sde": SDE}, "sde.first is 1 of 1 steps; expected at most -1"),
        ({"steps": 2, "sde": SDE}, "sde.first is 1 of 2 steps; expected at most 0"),
    ],
)
def test_plans_that_contradict_themselves_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Plan.model_validate(fields)


def request(**changes: Any) -> RolloutRequest:
    prompts = [{"id": "a", "text": "a red circle"}, {"id": "b", "text": "two blue squares"}]
    body = {"model": "mini", "prompts": prompts, "candidates": {"count": 3, "seed_root": 7}, "rewards": [{"name": "r"}]}
    return RolloutRequest.model_validate(body | changes)


def test_groups_are_expanded_by_prompt_id_or_taken_as_given() -> None:
    assert [(prompt.id, seeds) for prompt, seeds in request().groups()] == [
        ("a", expand_seeds(7, "a", 3)),
        ("b", expand_seeds(7, "b", 3)),
    ]
    explicit = request(candidates={"seeds": [[1, 2], [3]]})
    assert [(prompt.id, seeds) for prompt, seeds in explicit.groups()] == [("a", [1, 2]), ("b", [3])]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompts": [{"id": "a", "text": "x"}, {"id": "a", "text": "y"}]}, "two prompts share an id"),
        ({"rewards": [{"name": "r"}, {"name": "r", "weight": 2}]}, "a reward is named twice"),
        ({"rewards": [{"name": "r", "digest": "sha256:" + "0" * 64}]}, "got a digest without at"),
        ({"candidates": {"seeds": [[1]]}}, "seeds has 1 lists for 2 prompts"),
        ({"prompts": [{"id": "a", "text": "   "}]}, "at least 1 character"),
    ],
)
def test_requests_that_contradict_themselves_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        request(**changes)


def test_a_group_has_the_seeds_of_its_best_and_worst_candidates() -> None:
    scores = (0.4, 0.1, 0.9, 0.7)
    group = RolloutGroup(prompt_id="p", seeds=(10, 12, 13, 15), scores=scores, rewards={"clipscore": scores})
    assert group.best_worst(2) == [13, 12]
    assert group.best_worst(4) == [13, 15, 10, 12]
    with pytest.raises(ValueError, match="got count 5 of 4 candidates; expected 2 to 4"):
        group.best_worst(5)
