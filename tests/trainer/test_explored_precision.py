"""The precision of exploration: the fastest native one, and emulation only on request."""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from solrl_core.precision import support
from solrl_core.precision.support import fastest_precision
from solrl_trainer.calibration.plans import explored_precisions
from solrl_trainer.rollouts.loading import warn_of_emulation
from solrl_trainer.settings.presets import resolve

ROOT = Path(__file__).parents[2]
CUDA = torch.device("cuda")


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A simulated device of compute capability 9.0, on which all probes succeed."""
    support.probe.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(support, "has_fp8", lambda device: device.type == "cuda")
    yield
    support.probe.cache_clear()


@pytest.mark.usefixtures("h200")
def test_the_readme_and_calibrate_take_the_fastest_native_precision() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    line = next(line for line in text.splitlines() if "solrl-train run --preset flux1/" in line)
    words = shlex.split(line[line.index("solrl-train") :], comments=True)
    settings = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    config = resolve(words[words.index("--preset") + 1], overrides=settings).config
    measured = json.loads((ROOT / "benchmarks/results/rollout_phase.json").read_text())["models"]["flux"]["setting"]
    assert config.explore.precision == "auto"
    assert fastest_precision(CUDA) == measured["precision"] == "fp8"
    explore = config.explore
    assert (explore.candidates, explore.steps, explore.keep, config.regenerate.steps) == (24, 6, 4, 10)
    assert explored_precisions("auto", CUDA) == ["fp8", "bf16"]
    assert explored_precisions("nvfp4", CUDA) == ["nvfp4", "bf16"]
    assert explored_precisions("auto", torch.device("cpu")) == ["bf16"]


def test_a_run_that_requests_an_emulation_is_told_its_cost(notes: list[str]) -> None:
    warn_of_emulation(["bf16"], "nvfp4")
    warn_of_emulation(["nvfp4"], "auto")
    warn_of_emulation(["nvfp4", "bf16"], "bf16")
    assert notes == []
    warn_of_emulation(["nvfp4", "bf16"], "nvfp4")
    assert "slower than BF16" in notes[0]
