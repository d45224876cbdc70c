"""docs/python.md: its code runs on a real service; the examples regenerate a service's candidates and train."""

import asyncio
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from solrl_client.noise import initial_noise
from solrl_client.rollouts import RolloutClient
from solrl_core.families import load_backbone
from solrl_core.sampling.generator import Generator
from solrl_minis import catalog
from solrl_minis.verifier import verify
from tests.docs.fences import ROOT, blocks
from tests.support.service_helpers import RunningService, running_service

PAGE = "docs/python.md"
ELSEWHERE = "http://127.0.0.1:8100"
EXAMPLES = ("flow_factory_like", "verl_omni_like")
TEXT, SEEDS, STEPS = "a red circle", (5, 2**32 + 6, 2**53 - 1), 2
PROMPTS = [TEXT, "two blue squares"]
RED_CIRCLE = {"include": [{"class": "circle", "count": 1, "color": "red"}]}


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    """Started in the folder of the examples, where it finds their reward."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT / "examples")
        with running_service("--rewards", "clipscore", "colours:redness", model="mini-sd3") as running:
            yield running


@pytest.fixture(scope="module")
def client(service: RunningService) -> Iterator[RolloutClient]:
    with RolloutClient(service.url) as found:
        yield found


@pytest.fixture(scope="module")
def latents() -> torch.Tensor:
    """Latents of SEEDS, as a service in BF16 makes them."""
    return Generator(load_backbone("mini-sd3"), "bf16").generate(TEXT, SEEDS, steps=STEPS).latents


def pixels(image: Image.Image) -> NDArray[np.float32]:
    """An image as the verifier takes it, [3, H, W] in [0, 1]."""
    return (np.asarray(image, np.float32) / 255).transpose(2, 0, 1)


def imported(name: str) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
        return importlib.import_module(name)


def test_the_first_image_takes_three_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = [block for block in blocks(PAGE, "python") if block.title == "first.py"]
    assert len([line for line in block.text.splitlines() if line]) == 3
    monkeypatch.chdir(tmp_path)
    exec(compile(block.text, PAGE, "exec"), {})
    with Image.open("first.png") as image:
        assert (image.mode, image.size) == ("RGB", (64, 64))
        assert len(set(image.getdata())) > 10
        assert verify(pixels(image), RED_CIRCLE).strict


def test_exploring_takes_ten_lines_and_tells_its_progress(
    service: RunningService, capsys: pytest.CaptureFixture[str]
) -> None:
    explore, progress = [block for block in blocks(PAGE, "python") if block.title in ("explore.py", "progress.py")]
    assert len([line for line in explore.text.splitlines() if line]) <= 10
    names: dict[str, Any] = {}
    here = {ELSEWHERE: service.url, "mini-sana": "mini-sd3", "count=96": "count=6", "best_worst(24)": "best_worst(4)"}
    text = explore.text
    for shown, used in here.items():
        assert text.count(shown) == 1
        text = text.replace(shown, used)
    exec(compile(text, PAGE, "exec"), names)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["p0", "p1"]
    exec(compile(progress.text.replace(ELSEWHERE, service.url), PAGE, "exec"), names)
    assert names["bar"].n == 2
    assert names["answer"].groups == tuple(names["groups"])


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_loop_in_another_trainers_manner_regenerates_the_service_s_candidates_and_trains(
    name: str, client: RolloutClient, latents: torch.Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    example, run = imported(name), name.replace("_", "-")
    common = imported("sd3_lora")
    lora = common.Sd3Lora(common.folder_of(common.MODEL), client, common.MODEL, run)
    if name == "flow_factory_like":
        trainer = example.Trainer(lora, PROMPTS, group=4, keep=2, steps=STEPS)
        same(latents, [sample.latents for sample in trainer.inference(TEXT, SEEDS)])
        trainer.start(1)
    else:
        trainer = example.Trainer(lora, candidates=4, n=2, steps=STEPS)
        rows = {"raw_prompt": np.array([TEXT] * len(SEEDS), dtype=object), "seed": np.array(SEEDS)}
        same(latents, [output["latents"] for output in asyncio.run(trainer.generate_sequences(rows))])
        trainer.fit([PROMPTS])
    trained(client, run)
    *progress, last = capsys.readouterr().out.splitlines()
    assert progress == [
        "explored 1 of 2 prompts, 4 images each",
        "explored 2 of 2 prompts, 4 images each",
        "regenerating 4 images, and training on them",
    ]
    assert re.fullmatch(r"(epoch|step) 1: reward -?0\.\d{4}, loss -?\d\.\d{4}, \d+ s", last)


def same(latents: torch.Tensor, regenerated: Sequence[torch.Tensor]) -> None:
    """The miniature's weights are exact in bfloat16, so only the batch changes the rounding."""
    assert float((torch.stack(list(regenerated)) - latents).abs().max()) < 1e-4
    assert float((latents[0] - latents[1]).abs().mean()) > 0.1


def trained(client: RolloutClient, run: str) -> None:
    """Two versions are stored, which differ."""
    stored = client.adapters(run)
    assert stored is not None
    assert [version.version for version in stored.versions] == [0, 1]
    assert len({version.digest for version in stored.versions}) == 2


@pytest.mark.release
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_twice_and_refuses_a_run_that_exists_in_one_line(
    name: str, service: RunningService, client: RolloutClient
) -> None:
    words = [sys.executable, f"{name}.py", "--model", "mini-sd3", "--url", service.url, "--rounds", "0"]
    before = {run.run for run in client.runs().runs}
    for _ in range(2):
        subprocess.run(words, cwd=ROOT / "examples", check=True, timeout=600)
    first, second = {run.run for run in client.runs().runs} - before
    found = subprocess.run([*words, "--run", first], cwd=ROOT / "examples", capture_output=True, text=True, timeout=600)
    assert found.returncode == 1
    assert "Traceback" not in found.stderr
    assert "Adapter version is taken" in found.stderr
    for run in (first, second):
        client.delete(run)


def test_the_method_in_one_file_trains_and_pushes(
    client: RolloutClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    minimal = imported("sol_rl_minimal")
    sizes = {"CANDIDATES": 6, "EXPLORING_STEPS": 1, "KEEP": 4, "STEPS": 2, "TRAINED_STEPS": 1, "PROMPTS": PROMPTS}
    for name, value in sizes.items():
        monkeypatch.setattr(minimal, name, value)
    (mean,) = minimal.sol_rl(minimal.folder_of(minimal.MODEL), client, minimal.MODEL, "minimal", 1)
    assert 0 <= abs(mean) < 1
    loading, *progress, last = capsys.readouterr().out.splitlines()
    assert loading == f"loading {catalog.mini_sd3()}"
    assert [line.split()[2] for line in progress] == ["explored", "explored", "regenerating"]
    assert last.startswith(f"iteration 0: reward {mean:.4f}, loss ")
    trained(client, "minimal")
    client.delete("minimal")


@pytest.mark.parametrize(("model", "side"), [("mini-sana", 24), ("mini-sd3", 64), ("mini-flux", 64)])
def test_every_family_s_pipeline_starts_from_the_seeds_noise(model: str, side: int) -> None:
    """At 24 px, a row's number of values is not a multiple of 16: noise drawn in bfloat16 would differ."""
    backbone = load_backbone(model)
    pipeline: Any = backbone._pipeline  # type: ignore[attr-defined]
    channels, rows, _ = backbone.latent_shape
    shape = (channels, *[side * rows // backbone.height] * 2)
    noise = torch.from_numpy(initial_noise(SEEDS, shape))
    with imported("flow_factory_like").starting_from(pipeline, SEEDS):
        found = pipeline.prepare_latents(len(SEEDS), channels, side, side, torch.bfloat16, "cpu", None, None)
    if model == "mini-flux":
        found, noise = found[0], pipeline._pack_latents(noise, len(SEEDS), *shape)
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found, noise.bfloat16(), atol=1e-5)
    assert "prepare_latents" not in vars(pipeline)


def test_the_examples_need_of_solrl_only_its_client() -> None:
    for path in (ROOT / "examples").glob("*.py"):
        found = re.findall(r"^(?:from|import) (solrl_\w+)", path.read_text(), re.MULTILINE)
        assert set(found) <= {"solrl_client", "solrl_proto"}, path
