"""The core's exceptions, which are problem documents' texts and kinds, and suggestions for mistyped names."""

from typing import Any, get_args

import pytest
from solrl_core.errors import AdapterError, AdapterFault, MismatchError, RewardError
from solrl_core.suggestions import near
from solrl_proto.problems import ProblemKind

FIELDS: dict[str, Any] = {"where": "header", "got": [1], "expected": "2", "action": "send it again"}


@pytest.mark.parametrize("fields", [FIELDS, {}, {"where": "header"}, {"got": 0}])
def test_the_text_is_that_of_the_problem_it_becomes(fields: dict[str, Any]) -> None:
    error = AdapterError("shape", "a tensor does not fit", **fields)
    assert str(error) == str(ProblemKind.ADAPTER_SHAPE.problem("a tensor does not fit", **error.fields))
    assert str(MismatchError("noise", "a", **fields)) == str(ProblemKind.NOISE_CONTRACT.problem("a", **fields))
    assert str(MismatchError("digests", "a", **fields)) == str(ProblemKind.DIGEST_MISMATCH.problem("a", **fields))
    assert str(RewardError("clipscore", "failed")) == "reward 'clipscore' failed"


@pytest.mark.parametrize("fault", get_args(AdapterFault))
def test_each_adapter_fault_is_a_problem_kind(fault: str) -> None:
    assert ProblemKind[f"ADAPTER_{fault.upper()}"] == f"adapter-{fault}"


NAMES = ["explore.prompts", "evaluate.prompts", "prompts", "optimizer.learning_rate", "optimizer.batch", "iterations"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *((name, ["optimizer.learning_rate"]) for name in ("optimizer.lr", "training.lr", "learning-rate")),
        ("promts", ["prompts", "explore.prompts", "evaluate.prompts"]),
        *(("explore.promts", ["explore.prompts"]), ("ITERATION", ["iterations"]), ("nonsense", []), ("", [])),
    ],
)
def test_names_that_may_have_been_meant(name: str, meant: list[str]) -> None:
    assert near(name, NAMES) == meant
