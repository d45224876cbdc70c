"""Several backbones in one service, each with its name; equal parts are shared."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from solrl_proto.models import ModelList
from solrl_rollout.settings import ModelSpec, RolloutSettings, parse_model
from tests.services.fake_backend import chunk, engine_of, job
from tests.support.service_helpers import (
    Layout,
    RunningService,
    adapter_file,
    problem,
    rollout_request,
    running_service,
)
from tests.support.small_model import small_model
from transformers import CLIPModel


@pytest.fixture(scope="module")
def both() -> Iterator[RunningService]:
    with running_service(model=[small_model(), "flux=mini-flux"]) as running:
        yield running


def test_each_model_answers_under_its_name(both: RunningService) -> None:
    listed = ModelList.model_validate(both.client.get("/v1/models").json())
    assert [(model.name, model.family) for model in listed.models] == [("mini-sana", "sana"), ("flux", "flux")]
    sana, flux = (model.digests for model in listed.models)
    assert sana["transformer"] != flux["transformer"]
    assert sana["reward:clipscore"] == flux["reward:clipscore"]
    asked = {model: both.rollout(model=model) for model in ("mini-sana", "flux")}
    assert {model: answer["model"] for model, answer in asked.items()} == {"mini-sana": "mini-sana", "flux": "flux"}
    assert asked["mini-sana"]["groups"][0]["scores"] != asked["flux"]["groups"][0]["scores"]
    unknown = both.client.post("/v1/rollouts", json=rollout_request(model="mini-flux"))
    assert (unknown.status_code, problem(unknown)["expected"]) == (404, ["flux", "mini-sana"])


def test_an_adapter_belongs_to_the_model_it_was_pushed_for(both: RunningService, layout: Layout) -> None:
    assert both.push("shared", 0, adapter_file(layout, 1)).status_code == 201
    assert both.rollout(adapter=("shared", 0))
    other = both.client.post("/v1/rollouts", json=rollout_request(adapter=("shared", 0), model="flux"))
    assert (other.status_code, problem(other)["kind"]) == (422, "adapter-model")
    foreign = both.put("/v1/runs/foreign/adapters/0", adapter_file(layout, 1), model="flux")
    assert foreign.status_code == 422


def test_a_model_is_parsed_into_name_location_and_revision(tmp_path: Path) -> None:
    file, folder = tmp_path / "a=b@c.safetensors", tmp_path / "d=e@f"  # with the signs of a name and a revision
    file.touch()
    folder.mkdir()
    specs = {
        "mini-sana": ("mini-sana", "mini-sana", None),
        "flux=black-forest-labs/FLUX.1-dev@abc1": ("flux", "black-forest-labs/FLUX.1-dev", "abc1"),
        "black-forest-labs/FLUX.1-dev": ("flux.1-dev", "black-forest-labs/FLUX.1-dev", None),
        "f=/a.safetensors+me/flux@abc1": ("f", "/a.safetensors+me/flux", "abc1"),
        f"{file}+{folder}": ("a-b-c", f"{file}+{folder}", None),
        f"{file}+me/flux": ("a-b-c", f"{file}+me/flux", None),
        f"{file}+me/flux@abc1": ("a-b-c", f"{file}+me/flux", "abc1"),
    }
    assert {text: parse_model(text) for text in specs} == {text: ModelSpec(*spec) for text, spec in specs.items()}


@pytest.mark.parametrize("text", ["", "a=", "Upper=mini-sana", "mini-sana@", "=mini-sana"])
def test_an_invalid_model_and_two_with_one_name_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"name=\]location"):
        parse_model(text)
    with pytest.raises(ValueError, match="one name"):
        RolloutSettings(model=("mini-sana", "a/mini-sana"))


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
            chunk(replace(job(run, tenant, rewards=REWARDS), model=model), count=2)
            for model in ("mini-sd3", "flux")
            for tenant, run in (("one", "a"), ("one", "b"), ("other", "a"))
        ]
        engine.scheduler.submit(chunks)
        assert all(one.result.result().rewards.keys() == set(REWARDS) for one in chunks)
    finally:
        engine.close()
    assert sorted(loads) == ["mini-clip", "mini-pickscore"]
