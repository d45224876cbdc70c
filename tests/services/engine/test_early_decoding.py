"""Images that are only scored are decoded early if the plan says so, and by a decoder of the model's own."""

import base64
from functools import cache
from typing import Any

import pytest
import torch
from service_helpers import RunningService, problem, rollout_request
from solrl_core.early_decoder import fit_early_decoder
from solrl_core.families import load_backbone
from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.generator import Generator
from solrl_core.rewards import RewardSet
from solrl_proto.rollouts import Decoding, EarlyDecoder, RolloutAnswer
from solrl_proto.selection import best_worst

COUNT, STEPS, AFTER, KEEP = 30, 4, 2, 8
TEXT = "a red circle and a blue square"
PRUNE = {"after": AFTER, "keep": KEEP}


@cache
def backbone() -> PipelineBackbone:
    return load_backbone("mini-sana")


@cache
def early() -> EarlyDecoder:
    latents = Generator(backbone(), "bf16").generate(TEXT, range(12), steps=STEPS, decode=False).latents
    return fit_early_decoder(backbone(), latents, least=32)


def body(prune: dict[str, int] | None = None, /, images: str = "none", **changes: Any) -> dict[str, Any]:
    asked = rollout_request(prompts=[TEXT], count=COUNT, steps=STEPS, precision="bf16", images=images)
    asked["plan"] |= {"prune": prune, "early_decoder": early().model_dump(mode="json") | changes}
    return asked


def ask(service: RunningService, *prune: dict[str, int], **changes: Any) -> RolloutAnswer:
    response = service.client.post("/v1/rollouts", json=body(*prune, **changes))
    assert response.status_code == 200, response.text
    return RolloutAnswer.model_validate(response.json())


def scores(seeds: tuple[int, ...], until: int, decoder: EarlyDecoder | None) -> torch.Tensor:
    """Scores of the same candidates, generated here."""
    generator = Generator(backbone(), "bf16")
    images = generator.generate(TEXT, seeds, steps=STEPS, until=until, decoding=Decoding(decoder)).images
    rewards = RewardSet.load(["clipscore"], backbone())
    return rewards.score(["clipscore"], images, [TEXT] * len(seeds), [{}] * len(seeds))["clipscore"]


def test_scores_are_those_of_early_decoded_images(service: RunningService) -> None:
    answer = ask(service)
    (group,) = answer.groups
    assert answer.plan.early_decoder == early()
    assert list(group.scores) == pytest.approx(scores(group.seeds, STEPS, early()).tolist(), abs=1e-4)
    assert list(group.scores) != pytest.approx(scores(group.seeds, STEPS, None).tolist(), abs=1e-2)


@pytest.mark.parametrize("use", ["pruning", "all"])
def test_candidates_are_pruned_by_early_decoded_images(service: RunningService, use: str) -> None:
    (group,) = ask(service, PRUNE, scores=use).groups
    assert group.pruned is not None
    survivors = [place for place, gone in enumerate(group.pruned) if not gone]
    assert survivors == sorted(best_worst(scores(group.seeds, AFTER, early()), KEEP))
    assert survivors != sorted(best_worst(scores(group.seeds, AFTER, None), KEEP))
    final = scores(group.seeds, STEPS, early() if use == "all" else None)
    assert [group.scores[place] for place in survivors] == pytest.approx(final[survivors].tolist(), abs=1e-4)


def test_answered_images_are_decoded_whole(service: RunningService) -> None:
    (early_group,) = ask(service, PRUNE, images="png", scores="pruning").groups
    whole = rollout_request(prompts=[TEXT], count=COUNT, steps=STEPS, precision="bf16", images="png")
    group = service.client.post("/v1/rollouts", json=whole).json()["groups"][0]
    assert early_group.images is not None
    kept = [place for place, image in enumerate(early_group.images) if image is not None]
    assert len(kept) == KEEP
    assert [early_group.images[place] for place in kept] == [group["images"][place] for place in kept]
    response = service.client.post("/v1/rollouts", json=body(images="png"))
    assert response.status_code == 422
    assert "images are decoded whole" in str(problem(response))


@pytest.mark.parametrize(
    ("changes", "where", "said"),
    [
        (
            {"fitted_for": "sha256:" + "0" * 64},
            ".fitted_for",
            "fitted to a different autoencoder than that of mini-sana",
        ),
        ({"weights": base64.b64encode(bytes(54)).decode()}, "", "early decoder for 1 channels; this stage has 40"),
        ({"stages": 9}, "", "got 9 stages of the decoder; it has 4"),
    ],
)
def test_an_early_decoder_of_another_autoencoder_is_refused(
    service: RunningService, changes: dict[str, Any], where: str, said: str
) -> None:
    response = service.client.post("/v1/rollouts", json=body(**changes))
    found = problem(response)
    assert (response.status_code, found["kind"]) == (422, "fitted-mismatch")
    assert found["where"] == "body.plan.early_decoder" + where
    assert said in found["detail"]
    ask(service)
