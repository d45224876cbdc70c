"""The errors of a bad message are few, however many entries it has: each takes a kilobyte and is built at once."""

from typing import Any

import pytest
from pydantic import ValidationError
from solrl_proto.identifiers import Message
from solrl_proto.rollouts import RolloutRequest
from solrl_proto.status import IterationReport
from tests.support.service_helpers import rollout_request

MANY = 10_000
REQUEST = rollout_request(count=2)
REPORT: dict[str, Any] = {"score": {"mean": 0, "best": 0, "worst": 0}, "proxy_mean": 0, "loss": 0}
REPORT |= dict.fromkeys(("iteration", "version", "explored_version"), 1)
SAMPLES = {"iteration": 1, "version": 1, "precision": "bf16", "numerics": "native"}
NAMES = {str(i): "x" for i in range(MANY)}


def fitted(**rows: Any) -> dict[str, Any]:
    return {"plan": {"steps": 1, "fitted": {"sigmas": [1.0], "step_coeffs": [], "x0_coeffs": [[0.0, 1.0]]} | rows}}


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        *((RolloutRequest, changed) for changed in (NAMES, {"rewards": [1] * MANY})),
        *((RolloutRequest, {"prompts": [one] * MANY}) for one in (1, {})),
        (RolloutRequest, {"prompts": [{"id": "p", "text": "x"} | NAMES]}),
        *((RolloutRequest, {"candidates": {"seeds": seeds}}) for seeds in (["x"] * MANY, [[]] * MANY, [["x"] * MANY])),
        *((RolloutRequest, fitted(**{name: ["x"] * MANY})) for name in ("sigmas", "step_coeffs")),
        (RolloutRequest, fitted(x0_coeffs=[["x"] * MANY])),
        *((IterationReport, changed) for changed in (NAMES, {"rewards": NAMES}, {"seconds": NAMES})),
        (IterationReport, {"samples": SAMPLES | {"pairs": [1] * MANY}}),
    ],
    ids=range(15),
)
def test_many_wrong_entries_are_few_errors(kind: type[Message], changed: dict[str, Any]) -> None:
    whole = (REQUEST if kind is RolloutRequest else REPORT) | changed
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(whole)
    assert caught.value.error_count() <= 10


def test_the_number_of_entries_is_named() -> None:
    most = 64 + len(RolloutRequest.model_fields)
    with pytest.raises(ValidationError, match=f"{MANY + len(REQUEST)} entries; expected at most {most}"):
        RolloutRequest.model_validate(REQUEST | NAMES)
