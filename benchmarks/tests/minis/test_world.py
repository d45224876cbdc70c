"""The shapes world: its combinations, their wordings, and the held-out split."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from minis_recipe.world import KINDS, OPPOSITE, Combination, all_combinations, differing_in_one, sample_prompts, split
from minis_recipe.write_prompts import TEST, TRAIN, write
from solrl_minis import catalog

A, B = ("red", "circle"), ("blue", "square")
EVERY = list(all_combinations())

Meaning = tuple[Any, ...]


def meaning(combination: Combination) -> Meaning:
    """Objects, relation and size of a combination, computed independently of the code under test."""
    objects = tuple(sorted(combination.things * combination.count))
    if combination.relation is None:
        return objects, None, combination.size
    second, first = combination.things[1], combination.things[0]
    stands = {(second, combination.relation, first), (first, OPPOSITE[combination.relation], second)}
    return objects, frozenset(stands), combination.size


def test_keys_are_equal_exactly_for_equal_pictures_of_which_each_kind_has_each_once() -> None:
    for kind in KINDS:
        meanings = [meaning(c) for c in EVERY if c.kind == kind]
        assert len(set(meanings)) == len(meanings)
    keys: dict[str, set[Meaning]] = defaultdict(set)
    related = [c for c in EVERY if c.relation]
    turned = [Combination("position", c.things[::-1], relation=OPPOSITE[str(c.relation)]) for c in related]
    swapped = [Combination("two_object", c.things[::-1]) for c in EVERY if c.kind == "two_object"]
    everything = [*EVERY, *turned, *swapped]
    for combination in everything:
        keys[combination.key].add(meaning(combination))
    assert all(len(meanings) == 1 for meanings in keys.values())
    assert len(keys) == len({meaning(c) for c in everything})
    for one, same in zip(related, turned, strict=True):
        assert (one.held_out, one.ordered()) == (same.held_out, same.ordered())


def test_held_out_pictures_are_never_trained_on() -> None:
    train, test = split(False), split(True)
    trained = {meaning(c) for group in train.values() for c in group}
    held = {meaning(c) for group in test.values() for c in group}
    assert not trained & held
    assert all(train[kind] and test[kind] for kind in KINDS)
    assert sum(len(group) for split_ in (train, test) for group in split_.values()) == len(EVERY)
    assert 0.1 < sum(len(group) for group in test.values()) / len(EVERY) < 0.2


def test_no_text_belongs_to_two_meanings() -> None:
    meanings: dict[str, set[Meaning]] = defaultdict(set)
    for combination in EVERY:
        for text in combination.phrasings():
            meanings[text].add(meaning(combination))
    assert [text for text, of in meanings.items() if len(of) > 1] == []


@pytest.mark.parametrize(
    ("combination", "text"),
    [
        (Combination("single_object", (A,)), "a red circle"),
        (Combination("two_object", (A, B)), "a red circle and a blue square"),
        (Combination("counting", (A,), count=1), "one red circle"),
        (Combination("counting", (("cyan", "cross"),), count=4), "four cyan crosses"),
        (Combination("position", (A, B), relation="left of"), "a blue square to the left of a red circle"),
        (Combination("position", (A, B), relation="above"), "a blue square above a red circle"),
        (Combination("size", (A,), size="large"), "a large red circle"),
    ],
)
def test_wordings_say_what_is_meant(combination: Combination, text: str) -> None:
    assert combination.phrasings()[0] == text


def test_metadata_is_genevals() -> None:
    for combination in EVERY:
        metadata = combination.metadata
        assert metadata.keys() == {"tag", "include"}
        assert metadata["tag"] == combination.kind
        include = metadata["include"]
        assert [(item["color"], item["class"]) for item in include] == list(combination.things)
        assert all(item["count"] == combination.count for item in include)
        assert json.loads(json.dumps(metadata)) == metadata
        extra = [item.keys() - {"class", "count", "color"} for item in include]
        more = {"position": [set(), {"position"}], "two_object": [set(), set()], "size": [{"size"}]}
        assert extra == more.get(combination.kind, [set()])
        # A position points at the first object.
        assert combination.relation is None or include[1]["position"] == [combination.relation, 0]


def test_exactly_one_attribute_is_changed() -> None:
    known = set(EVERY)
    for combination in EVERY[::7]:
        others = differing_in_one(combination)
        assert len(set(others)) == len(others) >= 6
        for other in others:
            assert other in known
            assert meaning(other) != meaning(combination)
            mine, theirs = list(combination.things), list(other.ordered().things)
            kept = [thing for thing in mine if thing in theirs]
            assert len(theirs) == len(mine)
            changed = [
                len(kept) < len(mine),
                other.count != combination.count,
                other.size != combination.size,
                len(kept) == len(mine) and meaning(other)[1] != meaning(combination)[1],
            ]
            assert sum(changed) == 1, (combination, other)
            if len(kept) < len(mine):
                (old,), (new,) = [[t for t in ts if t not in kept] for ts in (mine, theirs)]
                assert (old[0] == new[0]) != (old[1] == new[1])
                if len(mine) == 2 and combination.relation:
                    # The changed object stands where the old one stood.
                    renamed = [new if thing == old else thing for thing in mine]
                    assert meaning(Combination("position", tuple(renamed), relation=combination.relation)) == meaning(
                        other
                    )


def test_samples_cycle_through_kinds_without_repeating_a_text() -> None:
    prompts = sample_prompts(True, 100, 3)
    assert [p["tag"] for p in prompts[:5]] == list(KINDS)
    assert len({p["prompt"] for p in prompts}) == 100
    assert sample_prompts(True, 100, 3) == prompts
    assert sample_prompts(True, 100, 4) != prompts
    texts = {text: c for c in EVERY for text in c.phrasings()}
    for prompt in prompts:
        assert texts[prompt["prompt"]].held_out


@pytest.mark.parametrize(
    ("world", "folder"), [("shapes", catalog.prompts()), ("words", catalog.words()), ("moving", catalog.moving())]
)
def test_the_shipped_prompt_files_are_up_to_date(tmp_path: Path, world: str, folder: Path) -> None:
    write(world, tmp_path / "new")
    written = {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()}
    shipped = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert written == shipped
    assert set(shipped) == {"train.txt", "test.txt", "train_metadata.jsonl", "test_metadata.jsonl"}
    texts = {split: shipped[f"{split}.txt"].decode().splitlines() for split in ("train", "test")}
    assert {split: len(set(lines)) for split, lines in texts.items()} == {"train": TRAIN, "test": TEST}
