"""The verifier on rendered scenes, on scenes with one attribute changed, and on images without objects."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from minis_recipe.scenes import render, sample_scenes
from minis_recipe.world import KINDS, Combination, all_combinations, differing_in_one
from solrl_minis import verifier
from solrl_minis.scenes import PALETTE, SIDE
from solrl_minis.verifier import find_objects, verifier_graded_reward, verifier_reward, verify, verify_batch
from solrl_minis.world import COLOURS, SHAPES
from support.drawn_scenes import scene

COUNT = 1000


@pytest.fixture(scope="module")
def combinations() -> list[Combination]:
    """As many of each kind, training and held out alike."""
    rng = np.random.default_rng(0)
    kinds = {kind: [c for c in all_combinations() if c.kind == kind] for kind in KINDS}
    return [kinds[KINDS[i % len(KINDS)]][rng.integers(len(kinds[KINDS[i % len(KINDS)]]))] for i in range(COUNT)]


@pytest.fixture(scope="module")
def images(combinations: list[Combination]) -> torch.Tensor:
    return render(sample_scenes(combinations, np.random.default_rng(1)), 2)


def test_both_rewards_detect_the_objects_of_an_image_once(
    combinations: list[Combination], images: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    detected = []
    monkeypatch.setattr(verifier, "find_objects", lambda image: detected.append(image) or find_objects(image))
    few, metadata = 1 - images[:20], [c.metadata for c in combinations[:20]]
    for reward in (verifier_reward, verifier_graded_reward):
        reward(few, [""] * 20, metadata)
    assert len(detected) == 20


def by_kind(combinations: list[Combination], values: list[float]) -> dict[str, float]:
    return {
        kind: float(np.mean([v for c, v in zip(combinations, values, strict=True) if c.kind == kind])) for kind in KINDS
    }


def test_ground_truth_is_right(combinations: list[Combination], images: torch.Tensor) -> None:
    verdicts = verify_batch(images, [c.metadata for c in combinations])
    strict = [v.strict for v in verdicts]
    assert np.mean(strict) >= 0.99
    assert min(by_kind(combinations, strict).values()) >= 0.97
    assert all(v.graded == 1 for v in verdicts if v.strict)


def test_one_changed_attribute_is_wrong(combinations: list[Combination], images: torch.Tensor) -> None:
    rng = np.random.default_rng(3)
    options = [differing_in_one(c) for c in combinations]
    asked = [others[rng.integers(len(others))].metadata for others in options]
    verdicts = verify_batch(images, asked)
    wrong = [1 - v.strict for v in verdicts]
    assert np.mean(wrong) >= 0.99
    assert min(by_kind(combinations, wrong).values()) >= 0.97


def test_graded_is_a_share_and_larger_for_near_misses(combinations: list[Combination], images: torch.Tensor) -> None:
    rng = np.random.default_rng(4)
    near, far = [], []
    for image, combination in zip(images.numpy()[:300], combinations, strict=False):
        others = differing_in_one(combination)
        near.append(verify(image, others[rng.integers(len(others))].metadata).graded)
        unrelated = [
            c for c in combinations if not set(c.things) & set(combination.things) and c.kind != combination.kind
        ]
        far.append(verify(image, unrelated[rng.integers(len(unrelated))].metadata).graded)
    assert all(0 <= value <= 1 for value in near + far)
    assert np.mean(near) > np.mean(far) + 0.2
    assert np.mean(np.array(near) > np.array(far)) > 0.85


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_object_is_named_and_measured(colour: str, shape: str) -> None:
    found = find_objects(scene((colour, shape, 20, 40, 10)))
    assert [(o.colour, o.shape) for o in found] == [(colour, shape)]
    assert found[0].x == pytest.approx(20, abs=1)
    assert found[0].y == pytest.approx(40, abs=1)
    assert found[0].side == pytest.approx(20, abs=2)


def strict(image: npt.NDArray[np.float32], combination: Combination) -> float:
    return verify(image, combination.metadata).strict


def test_positions_are_of_the_second_to_the_first() -> None:
    things, relations = (("red", "circle"), ("blue", "square")), ("left of", "right of", "above", "below")
    beside = scene(("red", "circle", 45, 30, 8), ("blue", "square", 15, 32, 8))
    upright = scene(("red", "circle", 30, 15, 8), ("blue", "square", 32, 45, 8))
    for image, right in ((beside, "left of"), (upright, "below")):
        answers = {one: strict(image, Combination("position", things, relation=one)) for one in relations}
        assert answers == {one: one == right for one in relations}


def test_counts_are_exact_and_extra_objects_are_wrong() -> None:
    two = scene(("red", "circle", 15, 15, 8), ("red", "circle", 45, 45, 8))
    assert [strict(two, Combination("counting", (("red", "circle"),), count=n)) for n in (1, 2, 3, 4)] == [0, 1, 0, 0]
    with_stranger = scene(("red", "circle", 15, 15, 8), ("red", "circle", 45, 45, 8), ("cyan", "cross", 15, 45, 7))
    assert strict(with_stranger, Combination("counting", (("red", "circle"),), count=2)) == 0
    assert strict(with_stranger, Combination("single_object", (("cyan", "cross"),))) == 0


def test_sizes_are_told_apart() -> None:
    for radius, size in ((6.5, "small"), (12.5, "large")):
        image = scene(("purple", "triangle", 30, 30, radius))
        for asked in ("small", "large"):
            assert strict(image, Combination("size", (("purple", "triangle"),), size=asked)) == (asked == size)


def test_right_shapes_and_colours_on_the_wrong_objects_are_wrong() -> None:
    image = scene(("red", "square", 15, 15, 8), ("blue", "circle", 45, 45, 8))
    verdict = verify(image, Combination("two_object", (("red", "circle"), ("blue", "square"))).metadata)
    assert verdict.strict == 0
    assert 0 < verdict.graded < 1


@pytest.mark.parametrize("value", [0.0, 0.5, 0.92, 1.0])
def test_a_blank_image_shows_nothing(value: float) -> None:
    image = np.full((3, SIDE, SIDE), value, np.float32)
    assert find_objects(image) == []
    for combination in list(all_combinations())[::100]:
        verdict = verify(image, combination.metadata)
        assert verdict.strict == 0
        assert 0 <= verdict.graded <= 0.5


def test_noise_and_an_image_wholly_of_the_colour_asked_for_are_wrong() -> None:
    noise = np.random.default_rng(0).random((20, 3, SIDE, SIDE), np.float32)
    red = PALETTE[0][:, None, None].expand(3, SIDE, SIDE).numpy()
    for image, shape in ((red, "square"), *((one, "circle") for one in noise)):
        assert strict(image, Combination("single_object", (("red", shape),))) == 0


def test_metadata_without_objects_or_of_other_images_is_an_error() -> None:
    for metadata in ({}, {"include": []}, {"tag": "counting"}):
        with pytest.raises(ValueError, match=r"metadata\.include is .*; expected a list"):
            verify(np.zeros((3, SIDE, SIDE), np.float32), metadata)
    with pytest.raises(ValueError, match="argument 2"):
        verify_batch(torch.zeros(2, 3, SIDE, SIDE), [Combination("single_object", (("red", "circle"),)).metadata])


def test_the_rewards_are_the_verdicts(combinations: list[Combination], images: torch.Tensor) -> None:
    asked = [c.metadata for c in [*combinations[:10], *combinations[20:30]]]
    verdicts = verify_batch(images[:20], asked)
    hard, soft = (reward(images[:20], [""] * 20, asked) for reward in (verifier_reward, verifier_graded_reward))
    assert hard.dtype == soft.dtype == torch.float32
    assert hard.tolist() == [v.strict for v in verdicts]
    assert soft.tolist() == pytest.approx([v.graded for v in verdicts])
    assert 0 < float(hard.mean()) < 1
    assert float((soft - hard).min()) >= 0
    assert torch.equal(verifier_reward(images[:20].bfloat16(), [""] * 20, asked), hard)
