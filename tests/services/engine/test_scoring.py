"""The scorer accepts images as floats or as bytes."""

import torch
from fake_backend import REWARD, brightness, chunk, job
from solrl_core.device_events import HostEvent
from solrl_core.rewards import RewardSet
from solrl_rollout.engine.batch_limit import BatchLimit
from solrl_rollout.engine.scoring import Scorer
from solrl_rollout.engine.work import GeneratedChunk
from solrl_rollout.status.metrics import Metrics


def test_bytes_get_the_scores_of_the_equivalent_floats() -> None:
    scorer = Scorer(RewardSet({REWARD: brightness}), torch.device("cpu"), BatchLimit("mini", "rewards", Metrics()))
    pixels = torch.randint(256, (4, 8, 8, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scored = []
    for images in (pixels, pixels.permute(0, 3, 1, 2).float() / 255):
        marks = HostEvent(), HostEvent(), HostEvent()
        scored.append(scorer.score(GeneratedChunk(chunk(job(images=True)), images, None, 0, 0.0, False, *marks)))
    assert torch.equal(scored[0].rewards[REWARD], scored[1].rewards[REWARD])
    for one in scored:
        assert one.images is not None
        assert torch.equal(one.images, pixels)
