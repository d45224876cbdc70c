"""The client with services of other versions: it ignores new fields of answers, and sends only those that it uses."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from solrl_client.rollouts import RolloutClient
from solrl_proto.rollouts import RolloutRequest
from solrl_proto.status import Point
from tests.services.iteration_helpers import held_out, report, run_settings
from tests.support.service_helpers import rollout_request
from tests.trainer.hostile_service import DIGEST, Answer, HostileService, hostile_service

MODELS = {
    "noise": {"version": 1, "probe": [0.5]},
    "models": [
        {
            **{"name": "mini-sana", "family": "sana", "height": 64, "width": 64, "latent_shape": [8, 8, 8]},
            **{"digests": {"vae": DIGEST}, "rewards": ["clipscore"], "lora_targets": ["to_q"]},
            "precisions": [{"precision": "bf16", "numerics": "native", "how": "natively", "quantized_share": 0.0}],
        }
    ],
}


@pytest.fixture
def service() -> Iterator[HostileService]:
    with hostile_service() as running:
        yield running


def newer(value: Any) -> Any:
    """An answer with another field in each of its objects."""
    if isinstance(value, list):
        return [newer(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {name: one if name in {"rewards", "digests"} else newer(one) for name, one in value.items()} | {"new": [1]}


def test_new_fields_of_answers_are_ignored(service: HostileService) -> None:
    request = RolloutRequest.model_validate(rollout_request(count=3, steps=1))
    with RolloutClient(service.url, patience=0) as client:
        plain = client.rollouts(request)
        service.change_lines = lambda lines: [json.dumps(newer(json.loads(line))).encode() + b"\n" for line in lines]
        assert client.rollouts(request) == plain
        service.answers = [Answer(parts=(json.dumps(newer(MODELS)).encode(),))]
        assert client.model("mini-sana").lora_targets == ("to_q",)
        refusal = {"type": "urn:solrl:problem:run-not-found", "title": "No such run", "status": 404, "detail": "none"}
        service.answers = [Answer(404, parts=(json.dumps(newer(refusal)).encode(),))]
        assert client.adapters("nobody") is None
        service.change_stored = lambda stored: stored.update(new=1)
        assert client.push("run", 0, None, "mini-sana", b"adapter").version == 0


def test_what_is_not_used_is_not_sent(service: HostileService) -> None:
    with RolloutClient(service.url, patience=0) as client:
        service.answers = [Answer()] * 2
        client.report_iteration("run", report(0, scoring=[]))
        client.report_iteration("run", report(0, held_out=[held_out(1, 0.5)], settings=run_settings()))
        client.rollouts(RolloutRequest.model_validate(rollout_request(count=3, steps=1)))
    plain, used, request = map(json.loads, service.bodies)
    required = {name for name, field in Point.model_fields.items() if field.is_required()}
    assert plain.keys() == required | {"rewards", "seconds", "planned"}
    assert used.keys() == plain.keys() | {"scoring", "held_out", "settings"}
    assert RolloutRequest.model_validate(request) == RolloutRequest.model_validate(rollout_request(count=3, steps=1))
