"""GenEval's rules: the verdicts of its own code on the same boxes, and the metadata that they accept.

`data/geneval.json` has verdicts of `evaluation/evaluate_images.py` on boxes made up for prompts of GenEval, some with
other relations and exclusions.
"""

import json
from typing import Any

import pytest
from reward_helpers import DATA
from solrl_core.rewards.geneval_rules import (
    COUNTING_THRESHOLD,
    MOST_OBJECTS,
    THRESHOLD,
    DetectedObject,
    check_metadata,
    is_correct,
    kept_objects,
    relations,
)

CASES = json.loads((DATA / "geneval.json").read_text())


def verdict(metadata: dict[str, Any], objects: list[DetectedObject], colours: dict[DetectedObject, str]) -> bool:
    check_metadata(metadata)
    kept = kept_objects(objects, metadata, threshold=THRESHOLD, counting_threshold=COUNTING_THRESHOLD)
    return is_correct(kept, metadata, lambda name, group: [colours[one] for one in group])


@pytest.mark.parametrize("case", CASES, ids=[f"{at}-{case['metadata']['tag']}" for at, case in enumerate(CASES)])
def test_verdicts_equal_the_originals(case: dict[str, Any]) -> None:
    objects = [DetectedObject(*row) for row in case["objects"]]
    colours = dict(zip(objects, case["colours"], strict=True))
    assert verdict(case["metadata"], objects, colours) is case["correct"]


def thing(name: str = "dog", score: float = 0.95, x: float = 0.0, y: float = 0.0, side: float = 10.0) -> DetectedObject:
    return DetectedObject(name, score, x, y, x + side, y + side)


@pytest.mark.parametrize(
    ("tag", "score", "kept"),
    [("single_object", 0.3, 0), ("single_object", 0.31, 1), ("counting", 0.9, 0), ("counting", 0.91, 1)],
)
def test_a_score_must_exceed_the_threshold_of_the_tag(tag: str, score: float, kept: int) -> None:
    found = kept_objects([thing(score=score)], {"tag": tag}, threshold=0.3, counting_threshold=0.9)
    assert len(found.get("dog", [])) == kept


def test_the_likeliest_objects_of_each_class_are_kept() -> None:
    dogs = [thing(score=0.5 + at / 100, x=at) for at in range(MOST_OBJECTS + 4)]
    found = kept_objects([*dogs, thing("cat")], {}, threshold=0.3, counting_threshold=0.9)
    assert found["dog"] == dogs[::-1][:MOST_OBJECTS]
    assert found["cat"] == [thing("cat")]


def test_colours_are_of_the_likeliest_objects() -> None:
    metadata = {"include": [{"class": "dog", "count": 1, "color": "red"}]}
    red, blue = thing(score=0.8), thing(score=0.9, x=50)
    colours = {red: "red", blue: "blue"}
    assert not verdict(metadata, [red, blue], colours)
    assert verdict(metadata, [red._replace(score=0.99), blue], {**colours, red._replace(score=0.99): "red"})
    assert verdict(metadata, [red], colours)
    both = {"include": [{"class": "dog", "count": 2, "color": "red"}]}
    assert not verdict(both, [red, blue], colours)
    assert verdict(both, [red, blue], {red: "red", blue: "red"})


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        (100, 0, {"right of"}),
        (-100, 0, {"left of"}),
        (0, 100, {"below"}),
        (0, -100, {"above"}),
        (100, 100, {"right of", "below"}),
        (100, 40, {"right of"}),
        (0, 0, set()),
        (2, 0, set()),
        (2.5, 0, set()),  # a fifth of the offset is beyond the margin
        (5, 0, {"right of"}),
    ],
)
def test_relations_depend_on_offset_and_size(x: float, y: float, expected: set[str]) -> None:
    assert relations(thing(x=x, y=y), thing()) == expected


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({}, "the metadata has no objects; expected GenEval's `include` or `exclude`"),
        ({"include": "dog"}, "the metadata has no objects"),
        ({"include": ["dog"]}, "include[0] is 'dog'; expected an object with a class"),
        ({"include": [{"class": "dog"}]}, "include[0].count is None; expected a whole number of at least 1"),
        ({"include": [{"class": "dog", "count": True}]}, "include[0].count is True"),
        ({"include": [{"class": "dog", "count": 1, "color": "teal"}]}, "include[0].color is 'teal'; expected one of"),
        ({"include": [{"class": "dog", "count": 1, "position": ["above", 0]}]}, "include[0].position is ['above', 0]"),
        (
            {"include": [{"class": "a", "count": 1}, {"class": "b", "count": 1, "position": ["near", 0]}]},
            "include[1].position is ['near', 0]; expected [RELATION, INDEX]",
        ),
    ],
)
def test_other_metadata_is_refused(metadata: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=r"metadata|clude") as caught:
        check_metadata(metadata)
    assert said in str(caught.value)
