"""What a run reports of its progress to the service, and its thumbnails."""

import base64
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from solrl_core.image_files import FRAME_MS
from solrl_proto.status import THUMBNAIL_BYTES, THUMBNAIL_SIDE, RunDetail
from solrl_trainer.loop import train
from solrl_trainer.records import status_reports
from solrl_trainer.records.status_reports import thumbnail
from tests.support.service_helpers import RunningService
from tests.support.small_model import small_model
from tests.trainer.real_runs import Watcher
from tests.trainer.training_helpers import events, tiny_config

SMALL = (
    f"model={small_model()}",
    *("explore.prompts=2", "explore.candidates=12", "explore.keep=4", "explore.steps=2", "regenerate.steps=2"),
    "explore.precision=nvfp4",
    *("evaluate.prompts=2", "evaluate.seeds=2", "evaluate.steps=1", "evaluate.every=1", "evaluate.fidelity_prompts=0"),
    *("optimizer.updates=1", "algorithm.timestep_fraction=0.5", "iterations=2"),
)


def test_a_run_reports_its_metrics_curve_settings_and_last_samples(
    small_service: RunningService, tmp_path: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_reports, "_LONGEST_END", 600.0)  # on a busy machine, too
    config = tiny_config(*SMALL, output=tmp_path, run="judged", rollout_url=small_service.url)
    train(config, Watcher())
    assert not [note for note in notes if "page" in note]
    detail = RunDetail.model_validate_json(small_service.client.get(f"/v1/runs/{config.run}/iterations").content)
    (run,) = [status for status in small_service.client.get("/v1/status").json()["runs"] if status["run"] == config.run]
    lines = events(config.output, "iteration")
    assert detail.curve.iterations == (0, 1)
    series = detail.curve.series
    for name, key in (("proxy", "proxy_mean"), ("best", "reward_best"), ("worst", "reward_worst"), ("loss", "loss")):
        assert series[name] == pytest.approx([line[key] for line in lines], rel=1e-4), name
    assert series["reward:clipscore"] == series["mean"]
    assert {"seconds:explore", "seconds:wait", "seconds:regenerate", "seconds:train", "seconds:push"} <= series.keys()
    assert (run["head"], run["last"]["planned"], run["last"]["version"]) == (2, 2, 2)
    evaluations = events(config.output, "evaluation")
    assert [(line["version"], line["images"]) for line in evaluations] == [(0, 2), (1, 2), (2, 2)]
    assert [one.version for one in detail.held_out] == [0, 1, 2]
    for line, shown in zip(evaluations, detail.held_out, strict=True):
        assert {name: one.mean for name, one in shown.rewards.items()} == pytest.approx(line["rewards"])
        assert next(iter(shown.rewards)) == "clipscore"
        if shown.version:
            assert {name: one.low for name, one in shown.rewards.items()} == pytest.approx(line["low"])
    assert [list(one["rewards"]) for one in run["held_out"]] == [["clipscore"]] * 2
    assert detail.settings.trained == config.weights
    assert detail.settings.values["explore.candidates"] == "12"
    assert not {"output", "rollout_url"} & detail.settings.values.keys()
    samples = detail.samples
    assert (samples.iteration, samples.precision, samples.numerics) == (1, "nvfp4", "emulated")
    assert [pair.place for pair in samples.pairs] == ["best", "worst"] * 2
    for pair in samples.pairs:
        explored, regenerated = (
            np.asarray(Image.open(io.BytesIO(base64.b64decode(text))).convert("RGB")).astype(float)
            for text in (pair.explored, pair.regenerated)
        )
        assert explored.shape == regenerated.shape == (64, 64, 3)
        assert 0.2 < np.abs(explored - regenerated).mean() < 60


@pytest.mark.parametrize(("height", "width"), [(64, 64), (1024, 768), (1, 2000)])
def test_a_thumbnail_is_small_and_keeps_its_shape(height: int, width: int) -> None:
    made = Image.open(io.BytesIO(base64.b64decode(thumbnail(torch.rand(3, height, width)))))
    scale = min(1.0, THUMBNAIL_SIDE / max(height, width))
    assert made.size == (max(1, round(width * scale)), max(1, round(height * scale)))


@pytest.mark.parametrize(("noise", "frames"), [(0.1, 12), (1.0, 6)])
def test_a_clip_s_thumbnail_plays_it_in_as_many_frames_as_fit(noise: float, frames: int) -> None:
    text = thumbnail(noise * torch.rand(33, 3, 72, 128) + (1 - noise) * torch.rand(33, 3, 1, 1))
    assert len(text) <= THUMBNAIL_BYTES
    with Image.open(io.BytesIO(base64.b64decode(text))) as made:
        assert (made.n_frames, made.size) == (frames, (128, 72))
        made.seek(frames - 1)
        made.load()
        assert made.info["timestamp"] + made.info["duration"] == pytest.approx(33 * FRAME_MS, abs=frames)
