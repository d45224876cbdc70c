"""Requests for a run's candidates, to a real service."""

from collections.abc import Iterator

import pytest
from service_helpers import RunningService, adapter_file, running_service
from solrl_core.families import load_backbone
from solrl_core.fingerprint import fingerprint
from solrl_core.lora import adapter_layout
from solrl_proto.problems import ProblemError
from solrl_proto.rollouts import PromptItem
from solrl_trainer.client import RolloutClient
from solrl_trainer.rollouts.source import rollout_source
from training_helpers import tiny_config

PROMPTS = [PromptItem(id="p", text="a red circle")]


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    with running_service() as running:
        yield running


def test_a_service_that_restarts_with_a_different_model_is_refused(service: RunningService) -> None:
    config = tiny_config("explore.candidates=4", "explore.keep=2", "explore.steps=1", run="changed")
    (model,) = service.client.get("/v1/models").json()["models"]
    ours = fingerprint(model["digests"], ["clipscore"])
    with RolloutClient(service.url) as client:
        backbone = load_backbone("mini-sana")
        layout = adapter_layout(backbone.transformer, backbone.lora_targets)
        client.push("changed", 0, None, config.model_name, adapter_file(layout, 0))
        numerics = {tier.precision: tier.numerics for tier in client.model(config.model_name).precisions}
        same = rollout_source(config, client, fingerprint=ours, numerics=numerics)
        assert same.candidates_of(PROMPTS, 0, 7).fingerprint == ours
        with pytest.raises(ProblemError) as raised:
            rollout_source(config, client, fingerprint="sha256:" + "0" * 64).candidates_of(PROMPTS, 0, 7)
    assert (raised.value.problem.kind, raised.value.problem.got) == ("digest-mismatch", ours)
