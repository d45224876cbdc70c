"""The verifier and the judge on drawn scenes, on scenes with one thing changed, and on images without objects."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from solrl_core.rewards.geneval_rules import RELATIONS
from solrl_minis import catalog, judge, verifier
from solrl_minis.judge import Detector, Judge, ReadObject, read, save, shows
from solrl_minis.scenes import PALETTE, SIDE
from solrl_minis.verifier import find_objects, verifier_graded_reward, verifier_reward, verify, verify_batch
from solrl_minis.world import COLOURS, SHAPES
from tests.minis.drawn_scenes import changes, drawn_scene, held_out, scene

SHIPPED = catalog.WEIGHTS / "mini-judge"
KINDS = 5
METADATA = held_out(catalog.prompts(), 12) * 4
"""Metadata of four scenes of each prompt, all kinds in turn."""
RED, BLUE, SWAPPED, CYAN = ("red", "circle"), ("blue", "square"), ("red", "square"), ("cyan", "cross")


def metadata(*things: tuple[str, str], count: int = 1, **more: Any) -> dict[str, Any]:
    """Metadata of these things, `more` of the last."""
    include = [{"class": shape, "count": count, "color": colour} for colour, shape in things]
    include[-1] |= more
    return {"include": include}


@pytest.fixture(scope="module")
def drawn() -> torch.Tensor:
    return torch.stack([drawn_scene(item, seed) for seed, item in enumerate(METADATA)])


@pytest.fixture(scope="module")
def shipped() -> Judge:
    return Judge()


@pytest.fixture(params=["verifier", "judge"])
def reward(request: pytest.FixtureRequest, shipped: Judge) -> Any:
    return verifier_reward if request.param == "verifier" else shipped


def scores(reward: Any, images: torch.Tensor, items: Sequence[dict[str, Any]]) -> torch.Tensor:
    values: torch.Tensor = reward(images, [""] * len(images), items)
    return values


def test_drawn_scenes_are_right(reward: Any, drawn: torch.Tensor) -> None:
    right = scores(reward, drawn, METADATA)
    assert right.mean() >= (0.99 if reward is verifier_reward else 0.95)
    assert right.view(-1, KINDS).mean(0).min() >= (0.97 if reward is verifier_reward else 0.9)


def test_one_changed_thing_is_wrong(reward: Any, drawn: torch.Tensor) -> None:
    options = [list(changes(item)) for item in METADATA]
    right = scores(reward, drawn, [others[7 * at % len(others)] for at, others in enumerate(options)])
    assert right.mean() <= (0.01 if reward is verifier_reward else 0.03)
    assert right.view(-1, KINDS).mean(0).max() <= (0.03 if reward is verifier_reward else 0.1)


def test_graded_is_a_share_and_larger_for_near_misses(drawn: torch.Tensor) -> None:
    near = torch.tensor([verify_batch(drawn[at, None], [next(changes(a))])[0].graded for at, a in enumerate(METADATA)])
    # Of another kind and another prompt.
    far = verifier_graded_reward(drawn, [""] * len(METADATA), METADATA[11:] + METADATA[:11])
    assert all(0 <= value <= 1 for value in [*near, *far])
    assert near.mean() > far.mean() + 0.2
    assert (near > far).float().mean() > 0.85
    assert all(verdict.graded == 1 for verdict in verify_batch(drawn, METADATA) if verdict.strict)


@pytest.mark.parametrize(("colour", "shape"), product(COLOURS, SHAPES))
def test_every_object_is_named_and_measured(colour: str, shape: str) -> None:
    image = scene((colour, shape, 21, 40, 9))
    ((detected,), (seen,)) = find_objects(image.numpy()), read(judge.load(SHIPPED), image[None])[0]
    assert (detected.colour, detected.shape) == (seen.colour, seen.shape) == (colour, shape)
    assert (detected.x, detected.y, detected.side) == pytest.approx((21, 40, 18), abs=2)
    assert (seen.x, seen.y, seen.side) == pytest.approx((21, 40, 18), abs=1.5)
    assert seen.confidence > 0.8


@pytest.mark.parametrize(("x", "y", "relation"), zip((12, 52, 33, 31), (33, 31, 12, 52), RELATIONS, strict=True))
def test_positions_are_of_the_second_to_the_first(reward: Any, x: float, y: float, relation: str) -> None:
    image = scene((*RED, 32, 32, 8), (*BLUE, x, y, 8)).expand(4, -1, -1, -1)
    items = [metadata(RED, BLUE, position=[kind, 0]) for kind in RELATIONS]
    assert scores(reward, image, items).tolist() == [kind == relation for kind in RELATIONS]


SCENES: dict[str, Any] = {
    "both": ([(*RED, 15, 15, 8), (*BLUE, 45, 45, 8)], metadata(RED, BLUE), metadata(SWAPPED, ("blue", "circle"))),
    "one": ([(*RED, 15, 15, 8)], metadata(RED), metadata(RED, BLUE)),
    "three": ([(*RED, 15, 15, 8), *((*BLUE, x, 45, 8) for x in (15, 45))], None, metadata(RED, BLUE)),
    "crossed": ([(*SWAPPED, 15, 15, 8), ("blue", "circle", 45, 45, 8)], None, metadata(RED, BLUE)),
    **{
        f"{n} for two": ([(*RED, at, at, 8) for at in (15, 45)], metadata(RED, count=2), metadata(RED, count=n))
        for n in (1, 3, 4)
    },
    "a stranger": ([*((*RED, at, at, 8) for at in (15, 45)), (*CYAN, 15, 45, 7)], None, metadata(RED, count=2)),
    "strangers": ([*((*RED, at, at, 8) for at in (15, 45)), (*CYAN, 15, 45, 7)], None, metadata(CYAN)),
    "small": ([(*RED, 30, 30, 6.5)], metadata(RED, size="small"), metadata(RED, size="large")),
    "large": ([(*BLUE, 30, 30, 12.5)], metadata(BLUE, size="large"), metadata(BLUE, size="small")),
}
"""Objects, metadata that they match, and metadata that they do not."""


@pytest.mark.parametrize("name", SCENES)
def test_an_image_shows_exactly_the_objects_of_its_metadata(reward: Any, name: str) -> None:
    objects, right, wrong = SCENES[name]
    image = scene(*objects)[None]
    assert right is None or scores(reward, image, [right]) == 1
    assert scores(reward, image, [wrong]) == 0
    if name in ("both", "crossed"):
        assert 0 < verify(image[0].numpy(), wrong).graded < 1


def test_a_diagonal_and_an_object_read_without_a_name_or_confidence_are_wrong() -> None:
    circle = ReadObject(*RED, 20.0, 30.0, 14.0, 0.9)
    square = ReadObject(*BLUE, 45.0, 32.0, 24.0, 0.9)
    assert shows([circle], metadata(RED))
    assert shows([square, circle], metadata(RED, BLUE, position=["right of", 0]))
    diagonal = [circle, replace(square, x=5.0, y=15.0)]
    assert not any(shows(diagonal, metadata(RED, BLUE, position=[kind, 0])) for kind in RELATIONS)
    assert not shows([replace(circle, confidence=0.4)], metadata(RED))
    doubts: list[dict[str, Any]] = [{"shape": None}, {"colour": None}, {"confidence": 0.4}]
    assert not any(shows([circle, replace(square, **doubt)], metadata(RED)) for doubt in doubts)


def test_images_without_objects_are_wrong(reward: Any) -> None:
    blank = torch.stack([torch.full((3, SIDE, SIDE), value) for value in (0.0, 0.5, 0.92, 1.0)])
    noise = torch.rand(20, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    red = torch.stack([scene((*SWAPPED, 32, 32, 40)), PALETTE[0][:, None, None].expand(3, SIDE, SIDE)])
    for images, item in ((blank, SWAPPED), (noise, SWAPPED), (noise, RED), (red, SWAPPED)):
        assert scores(reward, images, [metadata(item)] * len(images)).sum() == 0
    assert not any(find_objects(image) for image in blank.numpy())
    assert all(0 <= verify(image, item).graded <= 0.5 for image in blank.numpy() for item in METADATA[:60:7])
    assert not any(scores(reward, blank, [item] * 4).any() for item in METADATA[:60])


@pytest.mark.parametrize("wrong", [{}, {"include": []}, {"tag": "counting"}, metadata(("red", "bench"))])
def test_metadata_of_another_world_or_of_other_images_is_an_error(reward: Any, wrong: dict[str, Any]) -> None:
    two = torch.zeros(2, 3, SIDE, SIDE)
    with pytest.raises(ValueError, match=r"metadata\.include.* is .*; expected (a list|one of)"):
        scores(reward, two, [wrong] * 2)
    with pytest.raises(ValueError, match="argument 2"):
        scores(reward, two, [metadata(RED)])


def test_scores_are_of_each_image_alone(reward: Any, drawn: torch.Tensor) -> None:
    items = [*METADATA[:35], *(next(changes(item)) for item in METADATA[35:70])]
    values = scores(reward, drawn[:70], items)
    assert values.dtype == torch.float32
    assert values.tolist() == [float(scores(reward, drawn[i : i + 1], items[i : i + 1])) for i in range(70)]
    assert values[:35].mean() > 0.9 > 0.1 > values[35:].mean()
    assert scores(reward, drawn[:0], []).shape == (0,)


def test_the_verifier_s_rewards_are_its_verdicts_on_objects_detected_once(
    drawn: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    detected: list[Any] = []
    monkeypatch.setattr(verifier, "find_objects", lambda image: detected.append(image) or find_objects(image))
    few, items = 1 - drawn[:20], [*METADATA[:10], *METADATA[20:30]]
    for scorer in (verifier_reward, verifier_graded_reward):
        scores(scorer, few, items)
    assert len(detected) == 20
    verdicts = verify_batch(drawn[:20], items)
    hard, soft = (scores(scorer, drawn[:20], items) for scorer in (verifier_reward, verifier_graded_reward))
    assert hard.dtype == soft.dtype == torch.float32
    assert hard.tolist() == [verdict.strict for verdict in verdicts]
    assert soft.tolist() == pytest.approx([verdict.graded for verdict in verdicts])
    assert 0 < hard.mean() < 1
    assert (soft - hard).min() >= 0
    assert torch.equal(scores(verifier_reward, drawn[:20].bfloat16(), items), hard)


def test_unusable_images_and_weights_are_refused_and_the_digest_is_of_weights(shipped: Judge, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"got images of \(32, 32\) pixels; expected 64 × 64"):
        scores(shipped, torch.zeros(1, 3, 32, 32), [metadata(RED)])
    with pytest.raises(OSError, match="model"):
        Judge(str(tmp_path))
    save(Detector(width=32), tmp_path)
    with pytest.raises(ValueError, match="has other weights than the judge"):
        Judge(str(tmp_path))
    weights = judge.load(SHIPPED)
    save(weights, tmp_path)
    assert Judge(str(tmp_path)).digest == shipped.digest
    with torch.no_grad():
        weights.head.bias += 1
    save(weights, tmp_path)
    assert Judge(str(tmp_path)).digest != shipped.digest
    assert sum(parameter.numel() for parameter in weights.parameters()) == Judge.parameters
