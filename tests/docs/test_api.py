"""The page on the HTTP API: its commands return the answers shown, and its seeds are ours.

The service is that of the page on rewards, so that one service is enough.
"""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from solrl_minis import catalog
from solrl_proto.noise import expand_seeds
from solrl_proto.problems import ProblemKind
from tests.docs.fences import ROOT, blocks

PAGE = "docs/api.md"
ELSEWHERE = "http://127.0.0.1:8100"
LEFT_OUT = "…"


def shows(shown: Any, real: Any, where: str = "") -> None:
    """Fail unless `shown` is an abbreviation of `real`: "…" stands for anything, and seconds are not compared."""
    if shown == LEFT_OUT or ".seconds." in where:
        return
    if isinstance(shown, dict):
        for key in shown.keys() - {LEFT_OUT}:
            assert key in real, f"{where}.{key}"
            shows(shown[key], real[key], f"{where}.{key}")
    elif isinstance(shown, list):
        cut = shown[-1:] == [LEFT_OUT]
        assert len(shown) == len(real) or (cut and len(shown) <= len(real) + 1), where
        for i, (one, other) in enumerate(zip(shown, real, strict=False)):
            shows(one, other, f"{where}[{i}]")
    elif isinstance(shown, float):
        assert math.isclose(shown, real, abs_tol=2e-3), where
    elif isinstance(shown, str) and shown.endswith(LEFT_OUT):
        assert real.startswith(shown.removesuffix(LEFT_OUT)), where
    else:
        assert shown == real, where


@pytest.mark.slow
def test_every_command_returns_the_answer_shown(service: httpx.Client, tmp_path: Path) -> None:
    """Commands run in the page's order, in one shell and one folder."""
    address = str(service.base_url).rstrip("/")
    found = [
        b for b in blocks(PAGE) if b.language in ("sh", "json", "ndjson") or (b.language == "python" and not b.title)
    ]
    script, shown = ["set -eu"], {}
    for i, block in enumerate(found):
        text = block.text.replace(ELSEWHERE, address)
        if block.language == "sh":
            *before, last = re.split(r"^(?=curl )", text, maxsplit=1, flags=re.MULTILINE)
            script += [*before, f"{{ {last.rstrip()}\n}} > answer{i}" if last.startswith("curl") else last]
        elif block.language == "python":
            (tmp_path / "adapter.py").write_text(text)
            script.append(f"{sys.executable} adapter.py")
        else:
            assert found[i - 1].language == "sh"
            lines = block.language == "ndjson"
            shown[f"answer{i - 1}"] = list(map(json.loads, text.splitlines())) if lines else json.loads(text)
    environment = os.environ | {"MODEL": str(catalog.mini_sana())}
    done = subprocess.run(["bash", "-c", "\n".join(script)], cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert len(shown) >= 8
    for name, answer in shown.items():
        text = (tmp_path / name).read_text()
        shows(
            answer, [json.loads(line) for line in text.splitlines()] if isinstance(answer, list) else json.loads(text)
        )
    assert (tmp_path / "weights.safetensors").read_bytes() == (tmp_path / "adapter.safetensors").read_bytes()


def test_every_path_exists_in_the_service() -> None:
    paths = json.loads((ROOT / "proto/openapi.json").read_text())["paths"]
    patterns = [re.compile(re.sub(r"\{\w+\}", "[^/]+", path) + "$") for path in paths]
    used = set(re.findall(rf"{ELSEWHERE}([\w./-]*)", (ROOT / PAGE).read_text()))
    assert len(used) >= 7
    assert all(any(pattern.match(path) for pattern in patterns) or path == "" for path in used), used


def test_every_documented_problem_kind_exists() -> None:
    text = (ROOT / PAGE).read_text()
    table = text[text.index("| status | kinds |") : text.index("**Retrying.**")]
    kinds = set(re.findall(r"`([a-z]+(?:-[a-z]+)*)`", table))
    assert len(kinds) > 20
    assert kinds <= set(ProblemKind)


def code(title: str) -> dict[str, Any]:
    (block,) = [block for block in blocks(PAGE, "python") if block.title == title]
    names: dict[str, Any] = {}
    exec(block.text, names)
    return names


def test_seeds_are_expanded_as_the_page_says() -> None:
    seeds = code("seeds.py")["seeds"]
    for root, prompt in ((0, "p0"), (2**53 - 1, "ein Prompt, größer")):
        assert seeds(root, prompt, 5) == expand_seeds(root, prompt, 5)
