"""Plans with stochastic steps: the trainer's own trajectories of the same seeds, bit for bit, also when pruned."""

import base64
from typing import Any

import pytest
import torch
from service_helpers import RunningService, rollout_request
from solrl_core.families import Backbone
from solrl_core.rewards import RewardSet
from solrl_core.sampling.generator import Generator
from solrl_proto.rollouts import StochasticSteps
from solrl_proto.selection import best_worst

TEXT = "a red circle and a blue square"
COUNT, STEPS, AFTER, KEEP = 26, 4, 2, 10
KINDS: dict[str, dict[str, Any]] = {
    "window": {"kind": "flow", "eta": 0.8, "first": 1, "count": 2},
    "all": {"kind": "dance", "eta": 0.3},
    "cps": {"kind": "cps", "eta": 0.8},
}


def group_of(service: RunningService, sde: dict[str, Any], prune: dict[str, int] | None = None) -> dict[str, Any]:
    body = rollout_request(prompts=[TEXT], count=COUNT, steps=STEPS, precision="bf16") | {"latents": "float32"}
    body["plan"] |= {"sde": sde, "prune": prune}
    response = service.client.post("/v1/rollouts", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert StochasticSteps.model_validate(answer["plan"]["sde"]) == StochasticSteps.model_validate(sde)
    (group,) = answer["groups"]
    assert isinstance(group, dict)
    return group


def latents(group: dict[str, Any]) -> dict[int, torch.Tensor]:
    """Place → latents of each candidate that was not pruned."""
    found = {place: value for place, value in enumerate(group["latents"]["values"]) if value is not None}
    return {
        place: torch.frombuffer(bytearray(base64.b64decode(value)), dtype=torch.float32)
        for place, value in found.items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_candidates_are_the_trajectories_of_their_seeds_also_when_pruned(
    service: RunningService, backbone: Backbone, kind: str
) -> None:
    whole, pruned = group_of(service, KINDS[kind]), group_of(service, KINDS[kind], {"after": AFTER, "keep": KEEP})
    everything, found = latents(whole), latents(pruned)
    generator, sde = Generator(backbone, "bf16"), StochasticSteps.model_validate(KINDS[kind])
    made = generator.generate(TEXT, whole["seeds"], steps=STEPS, solver=sde, decode=False).latents
    assert all(torch.equal(everything[place], made[place].flatten()) for place in range(COUNT))
    ode = generator.generate(TEXT, whole["seeds"][:4], steps=STEPS, decode=False).latents
    assert not torch.allclose(made[:4], ode, atol=0.05)
    # Survivors continue with their own noise.
    assert [not gone for gone in pruned["pruned"]] == [place in found for place in range(COUNT)]
    assert all(torch.equal(found[place], everything[place]) for place in found)
    halfway = generator.generate(TEXT, whole["seeds"], steps=STEPS, solver=sde, until=AFTER)
    scores = RewardSet.load(["clipscore"], backbone).score(["clipscore"], halfway.images, [TEXT] * COUNT, [{}] * COUNT)
    assert set(found) == set(best_worst(scores["clipscore"], KEEP))
