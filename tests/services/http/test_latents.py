"""Final latents in answers: those that the trainer's own generator would make, within the service's limits."""

import base64
import hashlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from service_helpers import Layout, RunningService, adapter_file, problem, rollout_request, running_service
from solrl_core.adapter import decode_adapter
from solrl_core.families import Backbone
from solrl_core.rewards import RewardSet
from solrl_core.sampling.generator import Generator, GeneratorOutput
from solrl_proto.adapters import adapter_digest
from solrl_proto.noise import expand_seeds
from solrl_proto.rollouts import STREAM_MEDIA_TYPE, StochasticSteps
from solrl_proto.selection import best_worst

MIB = 2**20
KINDS: dict[str, dict[str, Any]] = {
    "window": {"kind": "flow", "eta": 0.8, "first": 1, "count": 2},
    "all": {"kind": "dance", "eta": 0.3},
    "cps": {"kind": "cps", "eta": 0.8},
}
EACH = 8 * 8 * 8 * 4
"""Bytes of one candidate's latents."""
AS_TEXT = 4 * -(-EACH // 3)
MOST = MIB // (EACH + AS_TEXT)
"""Candidates whose latents fit into the budget of `small`."""


@pytest.fixture(scope="module")
def small() -> Iterator[RunningService]:
    """A service with 1 MiB for bodies and latents."""
    limits = ("--max-inflight-bytes", "--max-adapter-bytes", "--max-body-bytes")
    with running_service(*(part for limit in limits for part in (limit, str(MIB)))) as running:
        yield running
        assert "Traceback" not in running.log.read_text()


def asked(**request: Any) -> dict[str, Any]:
    return rollout_request(precision="bf16", latents="float32", **request)


def answer_of(service: RunningService, **request: Any) -> Any:
    return service.rollout(**{"precision": "bf16", "latents": "float32", **request})


def group_of(service: RunningService, **request: Any) -> Any:
    (group,) = answer_of(service, **request)["groups"]
    return group


def tensors(group: dict[str, Any]) -> torch.Tensor:
    """The latents of candidates that were not pruned."""
    parts = [base64.b64decode(value) for value in group["latents"]["values"] if value is not None]
    assert group["latents"]["digest"] == f"sha256:{hashlib.sha256(b''.join(parts)).hexdigest()}"
    return torch.stack([torch.frombuffer(bytearray(part), dtype=torch.float32).view(8, 8, 8) for part in parts])


def generated(backbone: Backbone, count: int, adapter: bytes | None = None, **settings: Any) -> GeneratorOutput:
    generator = Generator(backbone, "bf16")
    generator.set_adapter(None if adapter is None else decode_adapter(adapter, generator.layout))
    return generator.generate("a red circle", expand_seeds(7, "p0", count), **{"steps": 2, **settings})


def test_latents_are_those_of_the_trainers_generator_bit_for_bit(
    service: RunningService, layout: Layout, backbone: Backbone
) -> None:
    file = adapter_file(layout, seed=3)
    assert service.push("latents", 0, file).status_code == 201
    group = group_of(service, count=30, adapter=("latents", 0))
    assert torch.equal(tensors(group), generated(backbone, 30, file).latents)
    assert group["latents"]["adapter"] == adapter_digest(file)
    assert not torch.equal(tensors(group), generated(backbone, 30).latents)


def test_latents_of_the_base_name_no_adapter_and_come_beside_images(
    service: RunningService, backbone: Backbone
) -> None:
    both = group_of(service, count=2, images="png")
    assert torch.equal(tensors(both), generated(backbone, 2).latents)
    assert both.pop("latents")["adapter"] is None
    assert both == group_of(service, count=2, images="png", latents=None)


def test_pruned_candidates_have_no_latents(service: RunningService, backbone: Backbone) -> None:
    group = group_of(service, count=30, steps=3, prune={"after": 1, "keep": 4})
    assert [value is None for value in group["latents"]["values"]] == group["pruned"]
    survivors = [place for place, pruned in enumerate(group["pruned"]) if not pruned]
    assert len(survivors) == 4
    assert torch.equal(tensors(group), generated(backbone, 30, steps=3).latents[survivors])


@pytest.mark.parametrize("kind", KINDS)
def test_stochastic_candidates_are_the_trajectories_of_their_seeds_also_when_pruned(
    service: RunningService, backbone: Backbone, kind: str
) -> None:
    sde, groups = StochasticSteps.model_validate(KINDS[kind]), []
    for prune in (None, {"after": 2, "keep": 10}):
        answer = answer_of(service, count=26, steps=4, sde=KINDS[kind], prune=prune)
        assert StochasticSteps.model_validate(answer["plan"]["sde"]) == sde
        groups.append(answer["groups"][0])
    whole, pruned = map(tensors, groups)
    made = generated(backbone, 26, steps=4, solver=sde).latents
    assert torch.equal(whole, made)
    assert not torch.allclose(made[:4], generated(backbone, 4, steps=4).latents, atol=0.05)
    survivors = [place for place, gone in enumerate(groups[1]["pruned"]) if not gone]
    assert torch.equal(pruned, whole[survivors]), "they continue with their own noise"
    halfway = generated(backbone, 26, steps=4, solver=sde, until=2).images
    scores = RewardSet.load(["clipscore"], backbone).score(["clipscore"], halfway, ["a red circle"] * 26, [{}] * 26)
    assert set(survivors) == set(best_worst(scores["clipscore"], 10))


def test_latents_that_never_fit_are_refused(small: RunningService) -> None:
    found = problem(small.client.post("/v1/rollouts", json=asked(count=MOST + 1)))
    assert (found["status"], found["kind"], found["where"]) == (422, "too-many-images", "body.latents")
    assert found["got"] == MOST + 1
    assert found["expected"].startswith(f"at most {MOST} candidates with latents")


def test_images_count_until_their_answer_is_read(small: RunningService) -> None:
    never = problem(small.client.post("/v1/rollouts", json=rollout_request(count=200, steps=1, images="png")))
    assert (never["status"], never["kind"], never["where"]) == (422, "too-many-images", "body.images")
    most = int(never["expected"].split()[2])
    unread = small.send(rollout_request(count=most, steps=1, images="png"), accept=STREAM_MEDIA_TYPE)
    with unread.socket:
        assert unread.socket.recv(12) == b"HTTP/1.1 200"
        found = problem(small.client.post("/v1/rollouts", json=rollout_request(count=most, steps=1, images="png")))
        assert (found["status"], found["kind"]) == (503, "too-many-bytes")
    while small.client.post("/v1/rollouts", json=rollout_request(count=most, images="png")).status_code == 503:
        pass


def test_latents_count_until_their_request_is_answered(small: RunningService) -> None:
    running = small.send(asked(count=MOST - 2, steps=200), accept=STREAM_MEDIA_TYPE)
    with running.socket:
        assert running.socket.recv(12) == b"HTTP/1.1 200"
        response = small.client.post("/v1/rollouts", json=asked(count=10))
        found = problem(response)
        assert (found["status"], found["kind"], response.headers["retry-after"]) == (503, "too-many-bytes", "5")
        assert found["got"] == 10 * (EACH + AS_TEXT)
        # A request without latents is accepted.
        plain = small.send(rollout_request(count=1, steps=1), accept=STREAM_MEDIA_TYPE)
        with plain.socket:
            assert plain.socket.recv(12) == b"HTTP/1.1 200"
    while (response := small.client.post("/v1/rollouts", json=asked(count=MOST // 4, steps=1))).status_code == 503:
        pass
    assert response.status_code == 200
