"""Digests of rewards without weights: they cover a reward and what it uses of its module, and nothing else there."""

import gc
import importlib.util
import itertools
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from solrl_core.fingerprint import source_digest
from solrl_core.sources import own_source

MODULE = '''\
"""Rewards of one's own."""

import math
from functools import cache, partial

LIMIT = 3
OTHER = 5
WEIGHTS = {"red": 1.0}
WEIGHTS["blue"] = 2.0
WEIGHTS.update(green=0.5)
try:
    import numpy as fast
except ImportError:
    fast = None


def scaled(value):
    return value * LIMIT * WEIGHTS["red"]


@cache
def colour(images, prompts, metadata):
    """Colourfulness."""
    print(prompts)
    return scaled(len(images)) if fast else 0


class Base:
    def level(self):
        return 1


class Bright(Base):
    def __call__(self, images, prompts, metadata):
        return self.level() + math.pi


def unrelated():
    return OTHER


bright = Bright()
halved = partial(scaled, 0.5)
made = [lambda: 1][0]

if __name__ == "__main__":
    print(colour([], [], []))
'''
NUMBERS = itertools.count()


def imported(path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> Any:
    """A module of this text."""
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module: Any = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    return module


def digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, name: str) -> str:
    """Digest of `name` in a module of this text, imported anew."""
    return source_digest(getattr(imported(tmp_path / f"rewards_{next(NUMBERS)}.py", monkeypatch, text), name))


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("colour", "len(images)", "len(prompts)"),
        ("colour", "value * LIMIT", "value / LIMIT"),
        ("colour", "LIMIT = 3", "LIMIT = 4"),
        ("colour", '"red": 1.0', '"red": 2.0'),
        ("colour", '["blue"] = 2.0', '["blue"] = 3.0'),
        ("colour", "green=0.5", "green=0.6"),
        ("colour", "fast = None", "fast = 1"),
        ("colour", "@cache\n", "@partial(lambda f: f)\n"),
        ("colour", "from functools import cache,", "from functools import lru_cache as cache,"),
        ("bright", "math.pi", "math.tau"),
        ("bright", "return 1", "return 2"),
        ("bright", "bright = Bright()", "bright = Bright( )"),
        ("halved", "scaled, 0.5", "scaled, 0.6"),
        ("halved", "value * LIMIT", "value / LIMIT"),
        ("made", "lambda: 1", "lambda: 2"),
    ],
)
def test_an_edit_of_the_reward_or_of_what_it_uses_changes_its_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, old: str, new: str
) -> None:
    assert MODULE.count(old) == 1
    before = digest(tmp_path, monkeypatch, MODULE, name)
    assert digest(tmp_path, monkeypatch, MODULE, name) == before
    assert digest(tmp_path, monkeypatch, MODULE.replace(old, new), name) != before


@pytest.mark.parametrize("name", ["colour", "bright"])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Rewards of one's own", "Our rewards"),
        ("OTHER = 5", "OTHER = 6  # more"),
        ("def unrelated", "# a comment\n\n\ndef unrelated"),
        ("return OTHER", "return OTHER + 1"),
        ("print(colour", "print(len, colour"),
        ("\nclass Base", "\n\ndef added():\n    return colour\n\n\nclass Base"),
    ],
)
def test_edits_elsewhere_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, old: str, new: str) -> None:
    assert MODULE.count(old) == 1
    assert digest(tmp_path, monkeypatch, MODULE.replace(old, new), name) == digest(tmp_path, monkeypatch, MODULE, name)


def test_what_its_module_does_not_name_has_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = MODULE + "\n\nclass Holder:\n    pass\n\n\nHolder.reward = [lambda: 1][0]\nholder = [lambda: 2]\n"
    path = tmp_path / "held.py"
    module = imported(path, monkeypatch, text)
    before = source_digest(module.holder[0])
    path.write_text(text.replace("OTHER = 5", "OTHER = 66"))
    assert source_digest(module.holder[0]) != before


def test_threads_may_read_sources_at_the_same_time() -> None:
    def let_others_run(phase: str, info: dict[str, int]) -> None:
        time.sleep(0.001)

    threshold = gc.get_threshold()
    gc.callbacks.append(let_others_run)
    gc.set_threshold(50)
    try:
        with ThreadPoolExecutor(4) as threads:
            sources = set(threads.map(own_source, [ThreadPoolExecutor] * 150))
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(let_others_run)
    assert len(sources) == 1
