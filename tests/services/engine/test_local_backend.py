"""The local backend in an engine: overlapped scoring does not change scores."""

import torch
from fake_backend import engine_of
from solrl_proto import Plan, PromptItem
from solrl_rollout.engine.work import Chunk, Job
from solrl_rollout.settings import Settings


def scores(overlap: bool) -> torch.Tensor:
    engine = engine_of(Settings(), overlap=overlap)
    engine.start().result()
    try:
        job = Job("t", "r", "mini-sana", None, "bf16", Plan(steps=2), ("clipscore",), images=False)
        chunks = [Chunk(job, PromptItem(id=name, text=f"a {name} circle"), range(24)) for name in ("red", "blue", "b")]
        engine.scheduler.submit(chunks)
        return torch.cat([chunk.result.result(600).rewards["clipscore"] for chunk in chunks])
    finally:
        engine.close()


def test_scores_do_not_depend_on_concurrent_generation() -> None:
    assert torch.equal(scores(overlap=True), scores(overlap=False))
