"""Claims of the paper: every figure of the page, and of README where it quotes the page, is computed from results."""

import json
import re
import shutil
from pathlib import Path

import claims
import pytest

NAMES = (
    r"24-in-\d\d|FLUX\.1|SD3\.5|NVFP4|FP[48]|BF16|H200|HPSv2|table \d|64 × 64|95 % intervals|"
    r"24 samples|(24|96)\s+candidates|12 (called|a\s+side)"
)
"""Names with digits, and the sizes that name a setting."""


def figures_in(text: str) -> list[str]:
    """Numbers of Markdown that are no part of a name, a link's target or code."""
    for part in (r"```.*?```", r"`[^`]*`", r"\]\([^)]*\)", NAMES):
        text = re.sub(part, " ", text, flags=re.S)
    return re.findall(r"\d+(?:\.\d+)?", text)


def test_the_page_is_that_of_the_stored_results() -> None:
    assert claims.PAGE.read_text(encoding="utf-8") == claims.page(claims.RESULTS)


@pytest.mark.parametrize(
    ("file", "place", "said"),
    [
        ("paper", ("tables", "gap", "gap", "pooled", "share", "mean"), "gain is 50.0 % ["),
        ("paper", ("tables", "families", "iterations", "Sol-RL", "100%", "high"), "1.68 × [1.35, 0.50] the iterations"),
        ("rollout_phase", ("models", "flux", "phase", "baseline", "s"), "SANA gain 0.03, 1.68"),
    ],
)
def test_another_result_gives_another_page(file: str, place: tuple[str, ...], said: str, tmp_path: Path) -> None:
    shutil.copytree(claims.RESULTS, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.png", "*.gz"))
    assert said not in claims.page(tmp_path)
    content = json.loads((tmp_path / f"{file}.json").read_text())
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = 0.5
    (tmp_path / f"{file}.json").write_text(json.dumps(content))
    assert said in claims.page(tmp_path)


def test_the_readme_quotes_figures_of_the_page() -> None:
    readme, page = ((claims.ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/findings.md"))
    quoted = [number for text in re.findall(r"\[([^\]]*)\]\(docs/findings\.md", readme) for number in figures_in(text)]
    assert len(quoted) >= 6
    assert set(quoted) <= set(figures_in(page))
