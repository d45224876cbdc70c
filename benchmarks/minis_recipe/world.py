"""The shapes world: all combinations of objects, their phrasings, and the split into training and held-out ones.

Each prompt comes with GenEval-style metadata: `tag`, and `include` with `class`, `count`, `color`, `position`, plus
`size`, which GenEval does not have. A scene shows exactly the included objects and no others.
"""

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from solrl_minis.world import COLOURS, SHAPES

SIZES = ("small", "large")
RELATIONS = ("left of", "right of", "above", "below")
KINDS = ("single_object", "two_object", "counting", "position", "size")
OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}

HELD_OUT_PERCENT = 15

_NUMBERS = ("zero", "one", "two", "three", "four")
_PLURALS = {"circle": "circles", "square": "squares", "triangle": "triangles", "cross": "crosses"}
_TEMPLATES = {
    "single_object": ("a {a}", "a picture of a {a}", "there is a {a}", "{a} alone"),
    "two_object": ("a {a} and a {b}", "a picture of a {a} and a {b}", "a {a} with a {b}", "there is a {a} and a {b}"),
    "counting": ("{n} {many}", "a picture of {n} {many}", "exactly {n} {many}"),
    "position": ("a {b} {rel} a {a}", "a picture of a {b} {rel} a {a}", "there is a {b} {rel} a {a}"),
    "size": ("a {size} {a}", "a picture of a {size} {a}", "there is a {size} {a}"),
}


def is_held_out(key: str) -> bool:
    """Whether the content of a prompt with this key is held out."""
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


def _rank(thing: tuple[str, str]) -> tuple[int, int]:
    return COLOURS.index(thing[0]), SHAPES.index(thing[1])


@dataclass(frozen=True)
class Combination:
    """Content of a prompt, independent of its wording.

    `things` holds one or two (colour, shape); `relation` is the position of the second relative to the first.
    """

    kind: str
    things: tuple[tuple[str, str], ...]
    count: int = 1
    relation: str | None = None
    size: str | None = None

    @property
    def key(self) -> str:
        """Key equal for combinations that describe the same picture (A left of B, B right of A; one A, a single A)."""
        if self.kind == "position":
            assert self.relation is not None
            swapped = (self.things[::-1], OPPOSITE[self.relation])
            return f"position {min((self.things, self.relation), swapped)}"
        if self.kind in ("single_object", "counting"):
            return f"count {self.count} {self.things}"
        return f"{self.kind} {sorted(self.things)} {self.size}"

    @property
    def held_out(self) -> bool:
        """Whether the combination is held out: nothing in this project trains on it."""
        return is_held_out(self.key)

    def ordered(self) -> "Combination":
        """Same picture with its two things in canonical order, as in `all_combinations`."""
        if list(self.things) == sorted(self.things, key=_rank):
            return self
        relation = OPPOSITE[self.relation] if self.relation else None
        return replace(self, things=self.things[::-1], relation=relation)

    @property
    def objects(self) -> tuple[tuple[str, str], ...]:
        """(colour, shape) of every object in the scene."""
        return self.things * self.count

    @property
    def metadata(self) -> dict[str, Any]:
        """GenEval-style metadata of the combination."""
        include: list[dict[str, Any]] = [
            {"class": shape, "count": self.count, "color": colour} for colour, shape in self.things
        ]
        if self.relation is not None:
            include[1]["position"] = [self.relation, 0]
        if self.size is not None:
            include[0]["size"] = self.size
        return {"tag": self.kind, "include": include}

    def phrasings(self) -> list[str]:
        """All wordings of this combination."""
        names = [f"{colour} {shape}" for colour, shape in self.things]
        colour, shape = self.things[0]
        many = f"{colour} {_PLURALS[shape] if self.count > 1 else shape}"
        relation = f"to the {self.relation}" if self.relation in ("left of", "right of") else self.relation
        return [
            template.format(a=names[0], b=names[-1], n=_NUMBERS[self.count], many=many, rel=relation, size=self.size)
            for template in _TEMPLATES[self.kind]
        ]


def all_combinations() -> Iterator[Combination]:
    """All combinations of the world; within a kind, each picture occurs once."""
    things = list(itertools.product(COLOURS, SHAPES))
    for thing in things:
        yield Combination("single_object", (thing,))
        for count in range(1, 5):
            yield Combination("counting", (thing,), count=count)
        for size in SIZES:
            yield Combination("size", (thing,), size=size)
    for first, second in itertools.combinations(things, 2):
        yield Combination("two_object", (first, second))
        for relation in RELATIONS:
            yield Combination("position", (first, second), relation=relation)


def split(held_out: bool) -> dict[str, list[Combination]]:
    """Held-out or training combinations, by kind."""
    groups: dict[str, list[Combination]] = {kind: [] for kind in KINDS}
    for combination in all_combinations():
        if combination.held_out == held_out:
            groups[combination.kind].append(combination)
    return groups


def differing_in_one(combination: Combination) -> list[Combination]:
    """Combinations that differ from this one in a single attribute: colour, shape, count, relation or size."""
    kind, things = combination.kind, combination.things
    others: list[Combination] = []

    def add(**changes: Any) -> None:
        others.append(replace(combination, **changes).ordered())

    for index, (colour, shape) in enumerate(things):
        changed = [(c, shape) for c in COLOURS if c != colour] + [(colour, s) for s in SHAPES if s != shape]
        for thing in changed:
            swapped = (*things[:index], thing, *things[index + 1 :])
            if len(set(swapped)) == len(swapped):
                add(things=swapped)
    if kind in ("single_object", "counting"):
        for other in range(1, 5):
            if other != combination.count:
                add(kind="counting", count=other)
    if kind == "position":
        for relation in RELATIONS:
            if relation != combination.relation:
                add(relation=relation)
    if kind == "size":
        add(size=SIZES[1 - SIZES.index(combination.size or "")])
    return others


def sample_prompts(held_out: bool, count: int, seed: int) -> list[dict[str, Any]]:
    """Sample `count` distinct prompts of one split as `{"prompt", "tag", "include"}`, cycling through the kinds.

    Raises:
        ValueError: fewer than `count` distinct texts exist.
    """
    rng = np.random.default_rng(seed)
    queues = {}
    for kind, combinations in split(held_out).items():
        texts = [(text, c) for c in combinations for text in c.phrasings()]
        queues[kind] = [texts[i] for i in rng.permutation(len(texts))]
    prompts: dict[str, dict[str, Any]] = {}
    while len(prompts) < count:
        if not any(queues.values()):
            raise ValueError(f"got a count of {count}; expected at most {len(prompts)}, the number of distinct prompts")
        for kind in KINDS:
            if queues[kind] and len(prompts) < count:
                text, combination = queues[kind].pop()
                prompts.setdefault(text, {"prompt": text, **combination.metadata})
    return list(prompts.values())
