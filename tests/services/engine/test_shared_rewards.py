"""A service reads a reward's weights once, for any number of models and experiments."""

from pathlib import Path
from typing import Any

import pytest
from fake_backend import engine_of
from solrl_proto import Plan, PromptItem
from solrl_rollout.engine.work import Chunk, Job
from solrl_rollout.settings import RolloutSettings
from transformers import CLIPModel

REWARDS = ("clipscore", "pickscore")


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Folders from which a complete CLIP was read; only these rewards read one."""
    seen: list[str] = []
    reading = CLIPModel.from_pretrained

    def read(where: Any, *arguments: Any, **options: Any) -> Any:
        seen.append(Path(where).name)
        return reading(where, *arguments, **options)

    monkeypatch.setattr(CLIPModel, "from_pretrained", read)
    return seen


def test_models_and_experiments_share_one_loaded_reward(loads: list[str]) -> None:
    models = ("mini-sd3", "flux=mini-flux")
    engine = engine_of(RolloutSettings(model=models, rewards=REWARDS, precision="bf16"))
    hosted = engine.start().result()
    try:
        assert [model.info.rewards for model in hosted] == [REWARDS] * 2
        chunks = [
            Chunk(
                Job(tenant, run, model, None, "bf16", Plan(steps=1), REWARDS, images=False),
                PromptItem(id="p", text="a red circle"),
                range(2),
            )
            for model in ("mini-sd3", "flux")
            for tenant, run in (("one", "a"), ("one", "b"), ("other", "a"))
        ]
        engine.scheduler.submit(chunks)
        assert all(chunk.result.result().rewards.keys() == set(REWARDS) for chunk in chunks)
    finally:
        engine.close()
    assert sorted(loads) == ["mini-clip", "mini-pickscore"]
