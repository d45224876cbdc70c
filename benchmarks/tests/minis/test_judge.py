"""The judge reads scenes as they were drawn, is trained on them alone, and its card says how far to trust it."""

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import minis_recipe
import pytest
import torch
from minis_recipe import detection
from minis_recipe.data import Source
from minis_recipe.world import Combination
from solrl_minis import catalog, judge
from solrl_minis.judge import Detector, Judge, ReadObject, read, save, shows
from solrl_minis.scenes import SIDE
from solrl_minis.world import COLOURS, SHAPES
from support.drawn_scenes import scene

SHIPPED = catalog.WEIGHTS / "mini-judge"
RED_CIRCLE = ReadObject("red", "circle", 20.0, 30.0, 14.0, 0.9)
BLUE_SQUARE = ReadObject("blue", "square", 45.0, 32.0, 24.0, 0.9)


@pytest.fixture(scope="module")
def detector() -> Detector:
    return judge.load(SHIPPED)


@pytest.fixture(scope="module")
def accepts() -> Judge:
    return Judge()


def metadata(kind: str, *things: tuple[str, str], **more: Any) -> dict[str, Any]:
    return Combination(kind, things, **more).metadata


def test_objects_are_compared_with_all_that_the_metadata_names() -> None:
    pair = (("red", "circle"), ("blue", "square"))
    both = [BLUE_SQUARE, RED_CIRCLE]
    assert shows(both, metadata("two_object", *pair))
    assert not shows([RED_CIRCLE], metadata("two_object", *pair))
    assert not shows([*both, BLUE_SQUARE], metadata("two_object", *pair))
    assert not shows(both, metadata("two_object", ("red", "square"), ("blue", "circle")))
    twice = [RED_CIRCLE, replace(RED_CIRCLE, x=50.0)]
    red = pair[0]
    assert [shows(twice, metadata("counting", red, count=n)) for n in (1, 2, 3)] == [False, True, False]
    sizes = {size: shows([RED_CIRCLE], metadata("size", red, size=size)) for size in ("small", "large")}
    assert sizes == {"small": True, "large": False}
    assert shows([BLUE_SQUARE], metadata("size", pair[1], size="large"))


@pytest.mark.parametrize(
    ("x", "y", "relation"),
    [(5, 31, "left of"), (60, 31, "right of"), (21, 5, "above"), (21, 60, "below"), (5, 15, None)],
)
def test_a_position_is_that_of_the_second_object_to_the_first(x: float, y: float, relation: str | None) -> None:
    objects = [RED_CIRCLE, replace(BLUE_SQUARE, x=x, y=y)]
    pair = (("red", "circle"), ("blue", "square"))
    held = [
        asked
        for asked in ("left of", "right of", "above", "below")
        if shows(objects, metadata("position", *pair, relation=asked))
    ]
    assert held == ([] if relation is None else [relation])


def test_an_object_without_a_name_or_read_without_confidence_is_wrong() -> None:
    asked = metadata("single_object", ("red", "circle"))
    assert shows([RED_CIRCLE], asked)
    assert not shows([replace(RED_CIRCLE, confidence=0.4)], asked)
    for doubtful in ({"shape": None}, {"colour": None}, {"confidence": 0.4}):
        assert not shows([RED_CIRCLE, replace(BLUE_SQUARE, **doubtful)], asked)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{}, {"include": [{"class": "bench", "count": 1, "color": "red"}]}])
def test_metadata_of_another_world_is_an_error(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        shows([RED_CIRCLE], given)


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_object_is_read(detector: Detector, colour: str, shape: str) -> None:
    ((found,),) = read(detector, torch.from_numpy(scene((colour, shape, 21, 40, 9)))[None])
    assert (found.colour, found.shape) == (colour, shape)
    assert (found.x, found.y, found.side) == pytest.approx((21, 40, 18), abs=1.5)
    assert found.confidence > 0.8


def test_the_judge_accepts_held_out_scenes_and_no_changed_or_damaged_ones(
    accepts: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Combination] = []
    draw_some = Source.draw
    monkeypatch.setattr(Source, "draw", lambda self, count: drawn.extend(found := draw_some(self, count)) or found)
    shares = detection.accepted(accepts, 300)
    assert len(drawn) == 300
    assert all(c.held_out for c in drawn)
    assert shares["right"] > 0.95
    assert shares["right, spoiled"] > 0.85
    assert shares["one attribute changed"] < 0.03
    assert shares["one object damaged"] < 0.15


def test_an_image_without_objects_is_wrong(accepts: Judge) -> None:
    red = metadata("single_object", ("red", "square"))
    blank = torch.stack([torch.full((3, SIDE, SIDE), value) for value in (0.0, 0.5, 0.92, 1.0)])
    noise = torch.rand(20, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    flat = torch.from_numpy(scene(("red", "square", 32, 32, 40)))[None]
    for images in (blank, noise, flat):
        assert accepts(images, [""] * len(images), [red] * len(images)).sum() == 0


def test_scores_are_of_each_image_alone(accepts: Judge) -> None:
    source = Source(8)
    combinations = source.draw(70)
    images = source.images(combinations, "cpu")
    asked = [c.metadata for c in combinations[:35]] + [source.change(c).metadata for c in combinations[35:]]
    scores = accepts(images, [""] * 70, asked)
    assert scores.dtype == torch.float32
    assert scores.tolist() == [float(accepts(images[i : i + 1], [""], asked[i : i + 1])) for i in range(70)]
    assert scores[:35].mean() > 0.9
    assert scores[35:].mean() < 0.1
    assert accepts(images[:0], [], []).shape == (0,)


def test_unusable_images_and_weights_are_refused_and_the_digest_is_of_the_weights(
    accepts: Judge, tmp_path: Path
) -> None:
    red = metadata("single_object", ("red", "square"))
    with pytest.raises(ValueError, match=r"got images of \(32, 32\) pixels; expected 64 × 64"):
        accepts(torch.zeros(1, 3, 32, 32), [""], [red])
    with pytest.raises(ValueError, match="argument 2 is"):
        accepts(torch.zeros(2, 3, SIDE, SIDE), [""] * 2, [red])
    with pytest.raises(OSError, match="model"):
        Judge(str(tmp_path))
    save(Detector(width=32), tmp_path)
    with pytest.raises(ValueError, match="has other weights than the judge"):
        Judge(str(tmp_path))
    weights = judge.load(SHIPPED)
    save(weights, tmp_path)
    assert Judge(str(tmp_path)).digest == accepts.digest
    with torch.no_grad():
        weights.head.bias += 1
    save(weights, tmp_path)
    assert Judge(str(tmp_path)).digest != accepts.digest
    assert sum(parameter.numel() for parameter in weights.parameters()) == Judge.parameters


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
