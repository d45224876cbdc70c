"""Invalid rollout requests get a problem document that names the field, and have no side effects."""

import json
import re
from typing import Any

import pytest
from tests.support.service_helpers import RunningService, problem, rollout_request, scores


def post(service: RunningService, change: dict[str, Any]) -> Any:
    # Not httpx's json=, which cannot send a lone surrogate as an escape.
    body = json.dumps(rollout_request(steps=1) | change)
    return service.client.post("/v1/rollouts", content=body, headers={"Content-Type": "application/json"})


@pytest.mark.parametrize(
    ("change", "where", "said"),
    [
        ({"prompts": []}, "body.prompts", "1 or more items"),
        ({"prompts": [{"id": "a", "text": "x"}] * 2}, "body", ""),
        ({"prompts": [{"id": "a", "text": "\ud800"}]}, "body.prompts.0.text", ""),
        ({"candidates": {"seeds": [[2**53]]}}, "body.candidates.seeds.0.0", ""),
        ({"plan": {"width": 100, "height": 100}}, "body.plan.width", ""),
        ({"adapter": {"run": "../etc", "version": 0}}, "body.adapter.run", "a name of 1 to 64 of a-z 0-9"),
        ({"model": "../../etc/passwd"}, "body.model", "a name of 1 to 64 of a-z 0-9"),
        ({"surprise": 1}, "body.surprise", "no field of this name"),
        ({"prompts": [{"id": "a", "text": "x" * 100_000}]}, "body.prompts.0.text", ""),
    ],
)
def test_an_invalid_field_is_named(service: RunningService, change: dict[str, Any], where: str, said: str) -> None:
    response = post(service, change)
    assert response.status_code == 422
    document = problem(response)
    assert (document["kind"], document["where"]) == ("invalid-request", where)
    assert document["expected"].startswith(said)
    assert document["detail"].startswith(f"{where}: ")
    assert len(response.content) < 2_000
    assert not re.search("validation|permitted|should", document["detail"])


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000),
        b'{"model": NaN}',
        b'{"model": -Infinity, "candidates": {"count": 1e999}}',
        b'{"candidates": {"count": 1' + b"0" * 400 + b"}}",
        b'{"candidates": {"count": 1' + b"0" * 5000 + b"}}",
    ],
    ids=["empty", "cut", "list", "null", "bytes", "deep", "nan", "infinity", "big", "huge"],
)
def test_invalid_bytes_are_a_problem(service: RunningService, body: bytes) -> None:
    response = service.client.post("/v1/rollouts", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code in (400, 413, 422)
    assert len(response.content) < 10_000
    document = problem(response)
    if body == b"{":
        assert document["detail"].startswith("the body is not JSON: Expecting property name")
        assert document["detail"].endswith(" at character 1")
        assert (document["where"], document["expected"], document.get("got")) == ("body", "JSON", None)


MOST = {"prompts": [{"id": str(i), "text": "x"} for i in range(2)], "candidates": {"count": 4096, "seed_root": 1}}


@pytest.mark.parametrize(
    ("change", "status", "kind"),
    [
        ({"model": "maxi-sana"}, 404, "model-not-found"),
        ({"adapter": {"run": "nobody", "version": 0}}, 404, "run-not-found"),
        ({"rewards": [{"name": "beauty"}]}, 422, "reward-not-loaded"),
        ({"rewards": [{"name": "clipscore", "weight": 1e39}]}, 422, "score-nonfinite"),
        (MOST, 422, "too-many-candidates"),
    ],
)
def test_unknown_names_and_excessive_counts_are_refused(
    service: RunningService, change: dict[str, Any], status: int, kind: str
) -> None:
    before = scores(service.rollout(steps=1))
    response = post(service, change)
    assert (response.status_code, problem(response)["kind"]) == (status, kind)
    assert scores(service.rollout(steps=1)) == before


def test_an_unsupported_precision_is_refused_with_the_supported_ones(service: RunningService) -> None:
    document = problem(post(service, {"plan": {"precision": "fp8"}}))
    assert (document["status"], document["where"]) == (422, "body.plan.precision")
    assert (document["got"], document["expected"]) == ("fp8", ["nvfp4", "bf16"])
