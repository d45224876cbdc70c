"""Images that are only scored are decoded in FP8 if the plan says so."""

import pytest
import torch
from service_helpers import RunningService, problem, rollout_request
from solrl_core.families import load_backbone
from solrl_core.families.decoder_fp8 import Fp8DecoderError
from solrl_core.generator import Generator
from solrl_core.rewards import RewardSet
from solrl_proto.rollouts import Decoding, RolloutAnswer
from solrl_rollout.engine.problems import fp8_decoder_unsupported

COUNT, STEPS = 30, 2
TEXT = "a red circle and a blue square"


def test_scores_are_those_of_images_decoded_in_fp8(service: RunningService) -> None:
    asked = rollout_request(prompts=[TEXT], count=COUNT, steps=STEPS, precision="bf16")
    asked["plan"]["decoder_precision"] = "fp8"
    answer = RolloutAnswer.model_validate(service.client.post("/v1/rollouts", json=asked).json())
    (group,) = answer.groups
    assert answer.plan.decoder_precision == "fp8"
    backbone = load_backbone("mini-sana")
    latents = Generator(backbone, "bf16").generate(TEXT, group.seeds, steps=STEPS, decode=False).latents
    rewards = RewardSet.load(["clipscore"], backbone)
    rounded, whole = (
        rewards.score(["clipscore"], backbone.decode(latents, decoding), [TEXT] * COUNT, [{}] * COUNT)["clipscore"]
        for decoding in (Decoding(precision="fp8"), Decoding())
    )
    assert list(group.scores) == pytest.approx(rounded.tolist(), abs=1e-4)
    assert list(group.scores) != pytest.approx(whole.tolist(), abs=1e-4)
    assert torch.corrcoef(torch.stack([rounded, whole]))[0, 1] > 0.99


def test_images_are_not_answered_in_fp8(service: RunningService) -> None:
    asked = rollout_request(prompts=[TEXT], count=2, steps=STEPS, precision="bf16", images="png")
    asked["plan"]["decoder_precision"] = "fp8"
    response = service.client.post("/v1/rollouts", json=asked)
    assert response.status_code == 422
    assert "scores them decoded in fp8; expected images none" in str(problem(response))


def test_a_decoder_without_such_convolutions_is_a_422() -> None:
    error = Fp8DecoderError("no convolution can compute in FP8", got="AutoencoderTiny", action="omit it")
    found = fp8_decoder_unsupported(error).problem
    assert (found.kind, found.status, found.where) == ("precision-unsupported", 422, "body.plan.decoder_precision")
    assert (found.got, found.action) == ("AutoencoderTiny", "omit plan.decoder_precision")
