"""Images that are only scored are decoded in FP8 if the plan says so."""

from dataclasses import replace

import pytest
import torch
from solrl_core.errors import DecoderError
from solrl_core.families import load_backbone
from solrl_core.rewards import RewardSet
from solrl_core.sampling.generator import Generator
from solrl_engine.backend import GenerationRequest
from solrl_proto.problems import ProblemError
from solrl_proto.rollouts import Plan, RolloutAnswer
from tests.services.fake_backend import FakeBackend, chunk, job, running_engine, scored
from tests.support.service_helpers import RunningService

COUNT, STEPS = 30, 2
TEXT = "a red circle and a blue square"


def test_scores_are_those_of_images_decoded_in_fp8(service: RunningService) -> None:
    made = service.rollout(prompts=[TEXT], count=COUNT, steps=STEPS, precision="bf16", decoder_precision="fp8")
    answer = RolloutAnswer.model_validate(made)
    (group,) = answer.groups
    assert answer.plan.decoder_precision == "fp8"
    backbone = load_backbone("mini-sana")
    latents = Generator(backbone, "bf16").generate(TEXT, group.seeds, steps=STEPS, decode=False).latents
    rewards = RewardSet.load(["clipscore"], backbone)
    rounded, whole = (
        rewards.score(["clipscore"], backbone.decode(latents, precision), [TEXT] * COUNT, [{}] * COUNT)["clipscore"]
        for precision in ("fp8", None)
    )
    assert list(group.scores) == pytest.approx(rounded.tolist(), abs=1e-4)
    assert list(group.scores) != pytest.approx(whole.tolist(), abs=1e-4)
    assert torch.corrcoef(torch.stack([rounded, whole]))[0, 1] > 0.99


def test_a_decoder_that_cannot_compute_in_fp8_is_a_422() -> None:
    def refuse(request: GenerationRequest) -> None:
        if request.plan.decoder_precision:
            raise DecoderError("no convolution can compute in FP8", got="AutoencoderTiny", action="omit it")

    asked = chunk(replace(job(), plan=Plan(steps=1, decoder_precision="fp8")))
    with running_engine(FakeBackend(on_step=refuse)) as engine, pytest.raises(ProblemError) as refused:
        scored(engine, asked)
    found = refused.value.problem
    assert (found.kind, found.status, found.where) == ("precision-unsupported", 422, "body.plan.decoder_precision")
    assert (found.got, found.action) == ("AutoencoderTiny", "omit plan.decoder_precision")
