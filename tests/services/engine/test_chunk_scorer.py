"""The scorer: images as floats or as bytes, rewards computed here and at servers."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from solrl_core.rewards import RewardSet
from solrl_core.rewards.images import as_bytes, as_uint8
from solrl_core.rewards.metadata import refuse
from solrl_core.rewards.ocr import wanted_text
from solrl_core.rewards.reward import checks_prompts
from solrl_core.sampling.device_events import DeviceEvent
from solrl_core.sampling.generator import GeneratorOutput
from solrl_core.sampling.sampler import Trajectory
from solrl_core.sampling.solvers import Euler
from solrl_engine.scorer import sum_times
from solrl_proto.rollouts import RewardTime
from solrl_rollout.engine.chunk_scorer import ChunkScorer
from solrl_rollout.engine.model_runner import ModelRunner
from solrl_rollout.engine.work import Chunk, GeneratedChunk
from solrl_rollout.status.rollout_metrics import RolloutMetrics
from tests.services.fake_backend import REWARD, FakeBackend, chunk, job
from tests.services.served_rewards import brightness


def generated(of: Chunk, images: torch.Tensor) -> GeneratedChunk:
    """A chunk with these images."""
    output = GeneratorOutput(Trajectory(torch.zeros(len(images), 1), Euler()), images)
    return GeneratedChunk(of, output, 0.0, False, *[DeviceEvent(torch.device("cpu"))] * 3)


def test_bytes_get_the_scores_of_the_equivalent_floats() -> None:
    scorer = ChunkScorer(RewardSet({REWARD: brightness}))
    pixels = torch.randint(256, (4, 8, 8, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scored = []
    for images in (pixels, pixels.permute(0, 3, 1, 2).float() / 255):
        scored.append(scorer.score_here(generated(chunk(job(images=True)), images)))
    assert torch.equal(scored[0].rewards[REWARD], scored[1].rewards[REWARD])
    for one in scored:
        assert one.images is not None
        assert torch.equal(one.images, pixels)


class AtServer:
    """A reward of a server; keeps the images that it is given. Each call takes 5 seconds of a clock."""

    at = "https://user:secret@nowhere:8200/path?key=secret"

    def __init__(self, clock: list[float]) -> None:
        self.given: list[torch.Tensor] = []
        self._clock = clock

    def __call__(self, images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Any]) -> torch.Tensor:
        self.given.append(images)
        self._clock[0] += 5
        return torch.full((len(images),), 2.0)


def test_a_server_gets_bytes_and_its_seconds_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    for module in ("solrl_rollout.engine.chunk_scorer", "solrl_core.rewards.reward"):
        monkeypatch.setattr(f"{module}.time", SimpleNamespace(monotonic=lambda: clock[0]))
    server = AtServer(clock)
    rewards = RewardSet({"there": server, REWARD: brightness})
    scorer = ChunkScorer(rewards)
    asking, plain = (chunk(job(rewards=names)) for names in (("there", REWARD), (REWARD,)))
    shown = chunk(job(rewards=("there",), images=True))
    assert scorer.asks_servers(asking.job)
    assert not scorer.asks_servers(plain.job)
    images = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    half = scorer.score_here(generated(asking, images))
    assert server.given == []
    assert list(half.rewards) == [REWARD]
    clock[0] += 1000  # between the two parts
    whole = asyncio.run(scorer.ask_servers(asking, half))
    assert torch.equal(server.given[0], as_uint8(images))
    assert list(whole.rewards) == ["there", REWARD]
    assert torch.equal(whole.rewards[REWARD], images.mean((1, 2, 3)))
    assert whole.rewards["there"].tolist() == [2.0] * 4
    assert (half.reward, whole.reward, whole.images) == (0.0, 5.0, None)
    with_images = asyncio.run(scorer.ask_servers(shown, scorer.score_here(generated(shown, images))))
    assert torch.equal(with_images.images, as_bytes(images))
    assert half.times == {REWARD: RewardTime(seconds=0)}
    assert whole.times == {REWARD: RewardTime(seconds=0), "there": RewardTime(seconds=5, server="nowhere:8200")}
    assert sum_times([whole.times, whole.times])["there"] == RewardTime(seconds=10, server="nowhere:8200")


def test_the_warm_up_scores_with_a_reward_of_texts_and_without_one_of_metadata() -> None:
    judged = []

    @checks_prompts(wanted_text)
    def ocr(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Any]) -> torch.Tensor:
        judged.extend(map(wanted_text, prompts, metadata))
        return torch.zeros(len(images))

    @checks_prompts(lambda text, metadata: refuse("metadata.include", None, "objects"))
    def geneval(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Any]) -> torch.Tensor:
        raise AssertionError

    scorer = ChunkScorer(RewardSet({"ocr": ocr, "geneval": geneval}))
    ModelRunner("model", FakeBackend(), scorer, "bf16", RolloutMetrics()).warm_up()
    assert set(judged) == {"A"}
