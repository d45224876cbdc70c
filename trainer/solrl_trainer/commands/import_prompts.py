"""`solrl-train prompts`: a prompt set of training and held-out prompts from the files that people have."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from solrl_trainer.prompts.prompt_sets import (
    LONGEST,
    NEGATIVE,
    folded,
    in_both,
    metadata_file,
    prompt_item,
    split_files,
)
from solrl_trainer.prompts.prompt_tables import prompts_of, rows_of
from solrl_trainer.run_folder.output_files import write_file

HELD_OUT = 128
"""Most held-out prompts, if their number is not given."""
_IDENTIFIER = re.compile(
    r"(?i)((image|caption|prompt|text|sample|row|item)[_ -]?)?(id|uid|uuid|guid|idx|index)|unnamed: 0|"
).fullmatch
"""Names of fields that number rows and say nothing about an image; the last two are of pandas."""
_SHOWN = 5
_SHARE = 10


@dataclass
class Imported:
    """Prompts that were read, and what was left out.

    Attributes:
        rows: each prompt once, with its text as `prompt` and its metadata.
        read: number of rows in the files.
        merged: number of rows equal to an earlier row, identifiers such as `image_id` apart.
        renumbered: number of merged rows with another identifier; the first row remains.
        dropped: `place: reason` of each unusable row.
        negative: number of rows whose negative prompt was left out.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    read: int = 0
    merged: int = 0
    renumbered: int = 0
    dropped: list[str] = field(default_factory=list)
    negative: int = 0

    def notes(self, name: str) -> list[str]:
        """Lines for a reader: numbers of rows, and the first that were dropped."""
        numbers = f"{name}: {self.read:,} rows read, {self.merged:,} merged with equal ones"
        lines = [f"{numbers}, {len(self.dropped):,} dropped, {len(self.rows):,} prompts remain"]
        if self.renumbered:
            lines.append(f"  {self.renumbered:,} of the merged ones differ in their ids alone; the first remains")
        lines += [f"  dropped {row}" for row in self.dropped[:_SHOWN]]
        if (more := len(self.dropped) - _SHOWN) > 0:
            lines.append(f"  and {more:,} more")
        if self.negative:
            lines.append(f"  {self.negative:,} negative prompts are left out: no image is generated with them")
        return lines


def import_prompts(
    files: Sequence[Path], output: Path, *, key: str | None = None, test: int | None = None, test_file: Path | None
) -> list[str]:
    """Write `train_metadata.jsonl` and `test_metadata.jsonl` into a folder, and return lines for a reader.

    The held-out prompts are `test_file`'s, or `test` prompts of `files`, by default a tenth, at most 128. A digest of
    their text selects them, so they do not depend on the order of the rows, and all rows of one `folded` text are in
    one split. The field `key`, by default the first of the usual names, has the text; other fields become metadata.

    A ValueError names a row without a prompt, a split without prompts, or a folder that has some; an OSError, a file.
    """
    targets = {split: metadata_file(output, split) for split in ("train", "test")}
    if there := [path for split in targets for path in split_files(output, split) if path.exists()]:
        raise ValueError(f"{there[0]} is there already; choose another --output, or remove it")
    if test is not None and test_file is not None:
        raise ValueError("got --test and --test-file; expected one of them")
    if test is not None and test < 1:
        raise ValueError(f"got --test {test}; expected at least 1")
    training = read_rows(files, "train", key)
    notes = training.notes("train")
    if test_file is not None:
        held_out = read_rows([test_file], "test", key)
        notes += held_out.notes("test")
        rows_of_split = {"train": training.rows, "test": held_out.rows}
    else:
        rows_of_split = split_rows(training.rows, test)
    for split, rows in rows_of_split.items():
        if not rows:
            raise ValueError(
                f"no {split} prompts remain of {len(training.rows):,}; expected at least one of each split"
            )
    output.mkdir(parents=True, exist_ok=True)
    for split, path in targets.items():
        write_file(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows_of_split[split]))
        notes.append(f"{path}: {len(rows_of_split[split]):,} prompt{'s' * (len(rows_of_split[split]) != 1)}")
    texts = {split: [row["prompt"] for row in rows] for split, rows in rows_of_split.items()}
    if shared := in_both(texts["train"], texts["test"], " or ".join(path.name for path in targets.values())):
        notes.append(shared)
    return notes


def read_rows(files: Sequence[Path], split: str, key: str | None) -> Imported:
    """Read the prompts of files; a ValueError names the place of a row whose prompt is missing or no text."""
    imported, rows_by_content = Imported(), dict[str, dict[str, Any]]()
    for place, prompt, fields in chain.from_iterable(prompts_of(rows_of(path, split), key) for path in files):
        imported.read += 1
        if not isinstance(prompt, str):
            raise ValueError(f"{place}: got the prompt {json.dumps(prompt)[:80]}; expected a text")
        if reason := _unusable(prompt):
            imported.dropped.append(f"{place}: {reason}")
            continue
        imported.negative += any(map(fields.get, NEGATIVE))
        metadata = {name: value for name, value in fields.items() if name not in ("prompt", *NEGATIVE)}
        row = {"prompt": prompt_item((place, prompt, metadata)).text, **metadata}
        content = json.dumps({name: value for name, value in row.items() if not _IDENTIFIER(name)}, sort_keys=True)
        if content in rows_by_content:
            imported.merged += 1
            imported.renumbered += rows_by_content[content] != row
            continue
        rows_by_content[content] = row
        imported.rows.append(row)
    return imported


def _unusable(prompt: str) -> str | None:
    if not prompt.strip():
        return "it is empty"
    if len(prompt.strip()) > LONGEST:
        return f"it has {len(prompt.strip()):,} characters; at most {LONGEST:,} are read"
    return None


def split_rows(rows: Sequence[dict[str, Any]], test: int | None) -> dict[str, list[dict[str, Any]]]:
    """Rows by split: the `test` texts with the smallest digests are held out, by default a tenth, at most HELD_OUT."""
    texts = sorted({folded(row["prompt"]) for row in rows}, key=lambda text: hashlib.sha256(text.encode()).digest())
    count = min(len(texts) // _SHARE or 1, HELD_OUT) if test is None else test
    held_out = set(texts[:count])
    return {
        "train": [row for row in rows if folded(row["prompt"]) not in held_out],
        "test": [row for row in rows if folded(row["prompt"]) in held_out],
    }
