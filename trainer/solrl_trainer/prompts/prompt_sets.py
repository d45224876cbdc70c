"""Prompt sets: a folder with `train` and `test` prompts as `.txt`, `.jsonl`, or GenEval's `*_metadata.jsonl`."""

import hashlib
import json
import logging
import random
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError
from solrl_core.registry import FolderRegistry
from solrl_proto.rollouts import PromptItem

from solrl_trainer.prompts.prompt_rewards import FIELD, check_overrides, prompt_overrides
from solrl_trainer.prompts.prompt_source import PromptSource
from solrl_trainer.prompts.prompt_tables import PromptRow, prompts_of, rows_of

logger = logging.getLogger(__name__)

PROMPTS = FolderRegistry(
    "prompts", "solrl.prompts", others=("package.module:attribute", "a folder with train/test files")
)
NEGATIVE = ("negative_prompt", "negative_prompts", "neg_prompt")
"""Fields of data sets whose prompts say what an image must not show."""
FEW = 32
"""Most values of a metadata field that groups prompts, such as GenEval's `tag`."""
_SHORT = 40
"""Most characters of such a value."""
LONGEST = 4096
"""Characters of a prompt on the wire."""
Value = TypeVar("Value")
RewardItems = tuple[tuple[str, float], ...]
"""Rewards of a source's prompts, with their weights."""


def find_prompts(name: str) -> Path:
    """Folder of a prompt set: a registered name, or the path of a folder; a ValueError if it is neither."""
    return Path(PROMPTS.locate(name))


@dataclass(frozen=True, eq=False)
class Split:
    """The prompts of one file, which has `rows` of them, each once; a text may be there again with other metadata."""

    path: Path
    prompts: tuple[PromptItem, ...]
    rows: int

    @property
    def texts(self) -> list[str]:
        return [item.text for item in self.prompts]

    @property
    def repeated(self) -> str | None:
        """How many prompts were read and how many are left, if some were repeated."""
        merged = self.rows - len(self.prompts)
        if not merged:
            return None
        outcome = f"{merged:,} repeated prompts are left out, and {len(self.prompts):,} remain"
        return f"{self.rows:,} prompts read from {self.path}: {outcome}"


def read_split(folder: Path, split: str) -> Split:
    """Read `<split>_metadata.jsonl`, `<split>.jsonl`, `<split>.txt` or `<split>/metadata.jsonl`, the first that exists.

    Rows are merged if text and metadata are equal. A prompt's id is a digest of its text, and of its metadata if the
    file has the text with several, so that its seeds do not depend on its position in the file.

    Raises:
        ValueError: no such file exists, several exist with different prompts, the file has no prompt, or a line is
            invalid (the error names it).
        OSError: the file cannot be read.
    """
    names = split_files(folder, split)
    files = [path for path in names if path.is_file()]
    if not files:
        raise ValueError(
            f"{folder} has none of {', '.join(str(path.relative_to(folder)) for path in names)}; expected one of them. "
            "`solrl-train prompts FILE --output FOLDER` makes them from other files"
        )
    return _read(folder, split, tuple((path, path.stat().st_mtime_ns, path.stat().st_size) for path in files))


@lru_cache(maxsize=8)  # a run asks several times, and a large file takes seconds
def _read(folder: Path, split: str, files: tuple[tuple[Path, int, int], ...]) -> Split:
    """The split of `files`, each (path, time of change, size), which must have the same prompts."""
    (path, *_), *duplicates = files
    rows = list(_items(path))
    if not rows:
        raise ValueError(f"{folder}: the {split} prompts are empty")
    for duplicate, *_ in duplicates:
        _require_equal({item.text for item in rows}, path, {item.text for item in _items(duplicate)}, duplicate)
    unique = list({_content(item): item for item in rows}.values())
    prompts = _identified(unique, Counter(item.text for item in unique))
    return Split(path, tuple(prompts), len(rows))


def split_files(folder: Path, split: str) -> tuple[Path, ...]:
    """Files that may have a split's prompts, the first that exists being read."""
    files = (f"{split}.jsonl", f"{split}.txt", f"{split}/metadata.jsonl")  # the last as of Hugging Face's imagefolder
    return metadata_file(folder, split), *(folder / name for name in files)


def metadata_file(folder: Path, split: str) -> Path:
    """A split's file of prompts with metadata."""
    return folder / f"{split}_metadata.jsonl"


def read_prompts(folder: Path, split: str) -> list[PromptItem]:
    """The prompts of a split; `read_split` lists the errors."""
    return list(read_split(folder, split).prompts)


def in_both(train: Sequence[str], test: Sequence[str], files: str) -> str:
    """Note about the texts that are in both splits, but for what `folded` ignores; empty if there are none."""
    trained, alike = set(train), set(map(folded, train))
    repeats = list(dict.fromkeys(text for text in test if folded(text) in alike))
    if not repeats:
        return ""
    near = sum(text not in trained for text in repeats)
    but = f" ({near:,} of them but for case, spaces, Unicode's form or punctuation at the end)" if near else ""
    return (
        f"{len(repeats):,} held-out prompts are also training prompts{but}, so their figures show what was trained on; "
        f"remove them from {files}: {repeats[0][:80]!r}" + (", …" if len(repeats) > 1 else "")
    )


def folded(text: str) -> str:
    """A text without what seldom changes an image: case, spaces, composed letters (NFC), punctuation at the end."""
    return " ".join(unicodedata.normalize("NFC", text).casefold().split()).rstrip(".!?…。 ")


def _items(path: Path) -> Iterator[PromptItem]:
    rows = prompts_of(rows_of(path, ""))
    return (prompt_item(row) for row in rows if path.suffix != ".txt" or row[1].strip())


def prompt_item(row: PromptRow) -> PromptItem:
    """A row's prompt; its other fields are its metadata.

    A ValueError names the place of a row without a text of 1 to 4096 characters, with metadata that is too large or
    that JSON has no form for, or with a negative prompt.
    """
    place, prompt, metadata = row
    try:
        item = PromptItem(id=_digest(prompt.strip()), text=prompt, metadata=metadata)
    except (ValueError, AttributeError) as error:
        if isinstance(error, ValidationError) and (fault := error.errors()[0])["loc"][0] == "metadata":
            raise ValueError(f"{place}: {fault['msg'].removeprefix('Value error, ')}") from error
        got = json.dumps(prompt, ensure_ascii=False)[:80]
        raise ValueError(f"{place}: expected a prompt of 1 to {LONGEST} characters, got {got}") from error
    if negative := next((name for name in NEGATIVE if metadata.get(name)), None):
        raise ValueError(
            f"{place}: got a {negative!r}, which no image would be generated with; remove it, or rename it if only "
            "rewards read it"
        )
    if FIELD in metadata:
        check_overrides(metadata[FIELD], place)
    return item


def _require_equal(texts: set[str], path: Path, other_texts: set[str], duplicate: Path) -> None:
    """Refuse a file with other prompts than the one that is read in its place."""
    if odd := sorted(texts ^ other_texts):
        raise ValueError(
            f"{duplicate} and {path} have different prompts, and only the latter would be read; remove one of them, or "
            f"give both the same prompts (only one has {odd[0][:80]!r})"
        )


def _with_rewards(item: PromptItem, rewards: RewardItems | None) -> PromptItem:
    """The item with its source's rewards, unless it names its own or the source has none."""
    if rewards is None or prompt_overrides(item) is not None:
        return item
    return item.model_copy(update={"metadata": {**item.metadata, FIELD: dict(rewards)}})


def _identified(items: Iterable[PromptItem], texts: Mapping[str, int]) -> list[PromptItem]:
    """The items, whose id is a digest of their metadata, too, where there are several of a text."""
    return [
        item if texts[item.text] == 1 else item.model_copy(update={"id": _digest(_content(item))}) for item in items
    ]


def _content(item: PromptItem) -> str:
    return json.dumps([item.text, item.metadata], sort_keys=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def prompts_of_iteration(prompts: list[PromptItem], count: int, seed: int, iteration: int) -> list[PromptItem]:
    """The `count` prompts of an iteration. Each pass over the set is a new shuffle that depends only on `seed`."""
    if count > len(prompts):
        raise ValueError(f"got {count} prompts per iteration; expected at most {len(prompts)}, the size of the set")
    passes = len(prompts) // count
    order = list(range(len(prompts)))
    random.Random(f"{seed}/{iteration // passes}").shuffle(order)
    start = (iteration % passes) * count
    return [prompts[i] for i in order[start : start + count]]


@dataclass(frozen=True)
class PromptSet:
    """The prompts of each source of a run in one split, whose ids all differ, and the sources' shares in proportion."""

    sources: tuple[list[PromptItem], ...]
    shares: tuple[float, ...] = (1.0,)

    @property
    def all(self) -> list[PromptItem]:
        """The prompts of all sources. The first ones, of any number, have the sources' shares."""
        return _interleaved(self.sources, self.shares)

    @property
    def by_digest(self) -> list[PromptItem]:
        """The prompts of all sources in an order whose first ones, of any number, stand for all.

        They have the sources' shares, and of each source, its `groups_of` have theirs. Within a group, a digest of the
        text decides: neither the order of the file nor a seed matters.
        """
        orders = []
        for source in self.sources:
            groups = [sorted(group, key=lambda item: item.id) for _, group in sorted(groups_of(source)[1].items())]
            orders.append(_interleaved(groups, list(map(len, groups))))
        return _interleaved(orders, self.shares)

    def sample(self, count: int) -> list[PromptItem]:
        """The first `count` prompts `by_digest`, or `all` if there are no more."""
        prompts = self.all
        return prompts if count >= len(prompts) else self.by_digest[:count]

    def covered(self, count: int) -> str:
        """What `sample` takes, as in "4 of 553 by digest; tag: color 1 of 94, …"; empty if it takes all."""
        sample = {item.id for item in self.sample(count)}
        if len(sample) == (total := len(self.all)):
            return ""
        parts = [f"{len(sample):,} of {total:,} by digest"]
        for name, groups in filter(lambda grouped: grouped[0], map(groups_of, self.sources)):
            shares = (f"{value} {_count(group, sample)} of {len(group):,}" for value, group in sorted(groups.items()))
            parts.append(f"{name}: {', '.join(shares)}")
        return "; ".join(parts)

    def of_iteration(self, count: int, seed: int, iteration: int) -> list[PromptItem]:
        """The `count` prompts of an iteration: each source's share, by `prompts_of_iteration`."""
        drawn = [
            prompts_of_iteration(prompts, share, seed, iteration) if share else []
            for prompts, share in zip(self.sources, self.counts(count), strict=True)
        ]
        return _interleaved(drawn, self.shares)[:count]

    def counts(self, count: int) -> list[int]:
        """Number of each source's prompts among `count` of an iteration, the same in every iteration."""
        numbers = [[source] * count for source in range(len(self.sources))]
        order = _interleaved(numbers, self.shares)[:count]
        return [order.count(source) for source in range(len(self.sources))]


def _interleaved(parts: Sequence[Sequence[Value]], shares: Sequence[float]) -> list[Value]:
    """The values in the order of Webster's method, which gives each part its share of the first ones, of any number."""
    places = sorted(
        ((place + 0.5) / share, part, place)
        for part, (values, share) in enumerate(zip(parts, shares, strict=True))
        for place in range(len(values))
    )
    return [parts[part][place] for _, part, place in places]


def _count(group: Sequence[PromptItem], ids: Collection[str]) -> int:
    return sum(item.id in ids for item in group)


def groups_of(prompts: Sequence[PromptItem]) -> tuple[str, dict[str, list[PromptItem]]]:
    """Prompts by the metadata field that all have with the most short values, of 2 to FEW; "" and one group without."""
    best: tuple[str, dict[str, list[PromptItem]]] = ("", {"": list(prompts)})
    for name in sorted(set.intersection(*(set(item.metadata) for item in prompts)) if prompts else ()):
        groups: dict[str, list[PromptItem]] = {}
        for item in prompts:
            value = item.metadata[name]
            if not isinstance(value, str | int) or len(str(value)) > _SHORT or len(groups) > FEW:
                break
            groups.setdefault(str(value), []).append(item)
        else:
            if len(best[1]) < len(groups) <= min(FEW, len(prompts) // 2):
                best = (name, groups)
    return best


def log_covered(held_out: PromptSet, count: int, which: str) -> None:
    """Say which part of the held-out prompts a sample covers."""
    if covered := held_out.covered(count):
        logger.info(f"held-out prompts {which}: {covered}")


def prompts_of_run(sources: Mapping[str, PromptSource], split: str) -> PromptSet:
    """The prompts of a run's sources, of equal ones the first source's. ValueError, OSError: one cannot be read."""
    splits = tuple(read_split(find_prompts(name), split) for name in sources)
    rewards = tuple(None if source.rewards is None else tuple(source.rewards.items()) for source in sources.values())
    return _joined(splits, rewards, tuple(source.share for source in sources.values()))


@lru_cache(maxsize=8)  # see `_read`
def _joined(splits: tuple[Split, ...], rewards: tuple[RewardItems | None, ...], shares: tuple[float, ...]) -> PromptSet:
    """The prompts of these splits, each with its source's rewards and share."""
    parts: list[list[PromptItem]] = []
    contents: set[str] = set()
    for split, of_source in zip(splits, rewards, strict=True):
        by_content = {_content(item): item for item in (_with_rewards(item, of_source) for item in split.prompts)}
        parts.append([item for content, item in by_content.items() if content not in contents])
        contents |= by_content.keys()
    texts = Counter(item.text for part in parts for item in part)
    return PromptSet(tuple(_identified(part, texts) for part in parts), shares)
