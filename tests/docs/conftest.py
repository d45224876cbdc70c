"""The documentation's examples as installed packages, and one service for all pages."""

import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from tests.docs.fences import blocks, commands, example
from tests.support.service_helpers import running_service

PAGES = ("docs/extending/reward.md", "docs/extending/algorithm.md", "docs/extending/family.md")


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder on the import path, for the duration of the module, with the pages' files and their entry points."""
    folder = tmp_path_factory.mktemp("examples")
    for name in ("my_prompts", "flux_prompts", "sign_prompts", "dataset/pickscore"):
        (folder / name).mkdir(parents=True)
        for split in ("train", "test"):
            text = 'a sign that says "{} {}"' if name == "sign_prompts" else "a picture of {} number {}"
            texts = "".join(f"{text.format(split, i)}\n" for i in range(100))
            (folder / name / f"{split}.txt").write_text(texts)
    for name, fields in (("my_images", ["image"]), ("my_pairs", ["chosen", "rejected"])):
        (folder / name).mkdir()
        (folder / name / "test.txt").write_text("a cat\n")
        files = {field: f"{field}.png" for field in fields}
        for file in files.values():
            Image.new("RGB", (8, 8)).save(folder / name / file)
        rows = [{"prompt": f"cat {i}", **files} for i in range(48)]
        (folder / name / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    save_file({"weight": torch.zeros(1)}, folder / "my_merged.safetensors")
    info = folder / "examples-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: examples\nVersion: 1.0\n")
    lines = []
    redness = example("README.md")
    (folder / redness.title).write_text(redness.text)
    for settings in blocks("docs/evidence/unproven.md", "yaml"):
        (folder / settings.title).write_text(settings.text)
    for page in PAGES:
        for file in filter(lambda block: block.title, blocks(page, "python")):
            (folder / file.title).write_text(file.text)
        for block in blocks(page, "toml"):
            for group, entries in tomllib.loads(block.text)["project"]["entry-points"].items():
                lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def service(examples: Path) -> Iterator[httpx.Client]:
    """Start a service with the command of the page on rewards; yields a client."""
    shown = (words for block in blocks(PAGES[0], "sh") for words in commands(block))
    _, _, *flags = next(words for words in shown if [*words[:2]] == ["solrl-rollout", "serve"])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(examples)
        with running_service(*flags) as running:
            yield running.client
