"""The judge is trained on drawn scenes alone, and right on held-out ones, also when they are spoiled."""

import ast
from pathlib import Path

import minis_recipe
import pytest
from minis_recipe import detection
from minis_recipe.data import Source
from minis_recipe.world import Combination
from solrl_minis import catalog
from solrl_minis.judge import Judge


def test_the_judge_accepts_held_out_scenes_and_no_changed_or_damaged_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Combination] = []
    draw_some = Source.draw
    monkeypatch.setattr(Source, "draw", lambda self, count: drawn.extend(found := draw_some(self, count)) or found)
    shares = detection.accepted(Judge(), 300)
    assert len(drawn) == 300
    assert all(c.held_out for c in drawn)
    assert shares["right"] > 0.95
    assert shares["right, spoiled"] > 0.85
    assert shares["one attribute changed"] < 0.03
    assert shares["one object damaged"] < 0.15


def imports(module: str) -> set[str]:
    """Full names of the miniatures' and the recipe's modules that one of them imports, directly or not."""
    folders = {"minis_recipe": Path(minis_recipe.__path__[0]), "solrl_minis": catalog.WEIGHTS.parent}
    seen: set[str] = set()
    queue = [module]
    while queue:
        name = queue.pop()
        package, _, rest = name.partition(".")
        file = folders.get(package, Path()) / f"{rest}.py"
        if name in seen or not file.is_file():
            continue
        seen.add(name)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                queue += [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
    return seen


def test_the_judge_uses_neither_verifier_nor_reward_and_no_reward_uses_the_judge() -> None:
    learns_from = imports("minis_recipe.detection")
    assert {"solrl_minis.judge", "minis_recipe.data"} <= learns_from
    assert "solrl_minis.verifier" not in learns_from
    trained = {f"minis_recipe.{name}" for name in ("clip", "preference", "preference_rewards", "backbone")}
    assert not learns_from & trained
    for module in trained:
        assert not imports(module) & {"solrl_minis.judge", "minis_recipe.detection"}, module
