"""The layout that a run has, in words, and what a run says that waits for its service."""

import logging

import pytest
from solrl_trainer.layouts.running import WasteNote, running_text, waste, waste_text
from solrl_trainer.settings.presets import resolve_again
from training_helpers import tiny_config

URL = "http://127.0.0.1:8100"
SHARED = "regenerate.at=service"
ALONE = "rollout_url=null"


@pytest.mark.parametrize(
    ("settings", "ranks", "device", "text"),
    [
        ((ALONE,), 2, "cuda:0", "2 GPUs explore, regenerate and train"),
        ((ALONE, "regenerate.at=none"), 1, "cpu", "1 CPU process explores and trains"),
        ((), 1, "cuda", f"1 GPU regenerates and trains; {URL} explores (lag 0)"),
        (
            ("explore.lag=1", SHARED),
            3,
            "cpu",
            f"3 CPU processes regenerate and train; {URL} explores and regenerates (lag 1)",
        ),
        (
            (SHARED, "explore.share=0.5"),
            1,
            "cuda",
            f"1 GPU explores, regenerates and trains; {URL} explores and regenerates (lag 0)",
        ),
        (
            ("explore.lag=null", SHARED, "regenerate.share=1"),
            1,
            "cuda:1",
            f"1 GPU trains; {URL} explores and regenerates (lag 1)",
        ),
    ],
)
def test_a_layout_says_who_does_what(settings: tuple[str, ...], ranks: int, device: str, text: str) -> None:
    assert running_text(tiny_config(*settings), ranks, device) == text


@pytest.mark.parametrize(
    ("shares", "wasted"),
    [
        ([0.9, 0.9, 0.9, 0.9], None),
        ([0.9, 0.9, 0.1, 0.9, 0.1], None),
        ([0.0, 0.0, 0.2, 0.1, 0.3], 0.2),
        ([0.0, 0.0, 0.15, 0.15, 0.15], None),
        ([0.9, 0.9, 0.9, 0.9, 0.9, 0.0, 0.1, 0.9], None),
        ([0.0, 0.0, 0.0, 0.0, 0.0, 0.4, 0.3], 0.3),
    ],
)
def test_waits_count_by_the_median_of_the_last_iterations(shares: list[float], wasted: float | None) -> None:
    assert waste(shares) == wasted


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            (),
            "start a new run with explore.lag=1, set explore.share=auto, give the service more GPUs, or do without it "
            "by rollout_url=null",
        ),
        (
            ("explore.lag=1", "explore.share=auto"),
            ": give the service more GPUs, or do without it by rollout_url=null explore.lag=0 explore.share=1",
        ),
        (("explore.lag=1", SHARED, "regenerate.share=0.5"), "set regenerate.share=auto, give"),
        (("explore.lag=1", SHARED, "regenerate.share=1"), "set regenerate.share=auto, give"),
        (("explore.lag=1", SHARED), ": set explore.share=auto, give"),
        (("explore.lag=1", SHARED, "optimizer.updates=1", "optimizer.streamed=false"), "set optimizer.streamed=true"),
        (("explore.lag=1", SHARED, "explore.share=auto", "optimizer.updates=2", "optimizer.streamed=false"), ": give"),
    ],
)
def test_advice_fits_the_settings(settings: tuple[str, ...], said: str) -> None:
    config = tiny_config(*settings)
    text = waste_text(config, 0.314)
    assert text.startswith(f"this run waited 31 % of its time for {URL}: ")
    assert said in text
    changes, compare, _ = text.partition(" by ")[2].partition(" (`solrl-train layout` compares)")
    assert compare
    alone = resolve_again(config, overrides=changes.split())
    assert not alone.config.uses_service


def test_a_run_that_waits_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    note = WasteNote(tiny_config())
    with caplog.at_level(logging.WARNING, "solrl_trainer"):
        for share in (0.0, 0.0, 0.1, 0.5, 0.4, 0.5, 0.6):
            note.iteration(share)
    assert [record.message.partition(" of ")[0] for record in caplog.records] == ["this run waited 40 %"]
