"""Rows of data sets of prompts: text, JSON lines, CSV, TSV, Parquet, and saved Hugging Face data sets."""

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from solrl_proto.text_files import parse_json, read_json, read_lines, read_text

Row = tuple[str, dict[str, Any]]
"""Place of a row, `FILE:LINE` or `FILE, row N`, and its fields."""
PromptRow = tuple[str, Any, dict[str, Any]]
"""Place of a row, its prompt, and its other fields."""

KEYS = ("prompt", "prompts", "caption", "captions", "text", "input")
"""Fields with the text of a prompt, in any case of letters; the first that a data set has."""


def rows_of(path: Path, split: str) -> Iterator[Row]:
    """The rows of a file, or of one split of a saved data set.

    Args:
        path: file `.txt` (a prompt per line), `.jsonl`, `.json` (a list), `.csv`, `.tsv`, `.parquet` or `.arrow`, or a
            folder that `datasets.save_to_disk` wrote or that has such files.
        split: of a folder with several, such as train.

    Raises:
        ValueError: another kind of file, a row that has no fields, or a folder without the split; names the place.
        OSError: the file cannot be read.
    """
    if path.is_dir():
        for file in _files_of(path, split):
            yield from rows_of(file, split)
        return
    if (read := _READERS.get(path.suffix.lower())) is None:
        raise ValueError(f"got {path}; expected a file of {', '.join(_READERS)}, or a folder of a saved data set")
    yield from read(path)


def prompts_of(rows: Iterable[Row], key: str | None = None) -> Iterator[PromptRow]:
    """Rows with their prompt: the field `key`, or the first of KEYS that the first row has.

    Raises:
        ValueError: a row has no such field; names the place and the fields that there are.
    """
    for place, fields in rows:
        key = _prompt_key(fields, place, key)
        others = dict(fields)
        yield place, others.pop(key), others


def _prompt_key(fields: Mapping[str, Any], place: str, key: str | None) -> str:
    if key is None:
        folded = {name.strip().lower(): name for name in reversed(list(fields))}
        key = next((folded[one] for one in KEYS if one in folded), None)
    if key is None or key not in fields:
        wanted = f"{key!r}" if key else f"one of {', '.join(KEYS)}, or --key NAME"
        raise ValueError(f"{place}: got the fields {', '.join(map(str, fields)) or 'none'}; expected {wanted}")
    return key


def _files_of(folder: Path, split: str) -> list[Path]:
    """Data files of one split: a folder of that name, files whose names begin with it, or all if nothing has it."""
    inner = next((folder / name for name in (split, "data") if (folder / name).is_dir()), folder)
    files = sorted(path for path in inner.iterdir() if path.suffix.lower() in _READERS and path.name not in _DESCRIBING)
    named = [path for path in files if path.name.startswith(split)]
    found = files if inner.name == split or (inner / "dataset_info.json").is_file() else named
    if not found:
        there = sorted(path.name for path in folder.iterdir())
        raise ValueError(
            f"got {folder} with {', '.join(there[:8]) or 'nothing'}; expected files of the split {split!r}"
        )
    return found


_DESCRIBING = ("dataset_info.json", "dataset_dict.json", "state.json")


def _text(path: Path) -> Iterator[Row]:
    for number, line in enumerate(read_lines(path), 1):
        yield f"{path}:{number}", {"prompt": line}


def _json_lines(path: Path) -> Iterator[Row]:
    for number, line in enumerate(read_lines(path), 1):
        if line.strip():
            place = f"{path}:{number}"
            yield place, _object(parse_json(line, place), place)


def _json(path: Path) -> Iterator[Row]:
    rows = read_json(path)
    if not isinstance(rows, list):
        raise ValueError(f"{path}: got {type(rows).__name__}; expected a list of objects or texts")
    for number, row in enumerate(rows, 1):
        place = f"{path}, row {number}"
        yield place, {"prompt": row} if isinstance(row, str) else _object(row, place)


def _object(row: Any, place: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"{place}: got {json.dumps(row)[:80]}; expected a JSON object with a prompt")
    return row


def _separated(path: Path) -> Iterator[Row]:
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    table = csv.DictReader(io.StringIO(read_text(path), newline=""), delimiter=delimiter, strict=True)
    try:
        for fields in table:
            place = f"{path}:{table.line_num}"
            if None in fields or None in fields.values():
                expected = len(table.fieldnames or ())
                raise ValueError(f"{place}: got another number of cells than the first line's {expected}")
            yield place, fields
    except csv.Error as error:
        raise ValueError(f"{path}:{table.line_num}: {error}") from error


def _table(path: Path) -> Iterator[Row]:
    """Rows of Parquet or of an Arrow stream, without columns that JSON has no form for, such as images."""
    try:
        from pyarrow import ipc, parquet
    except ImportError as error:
        raise ValueError(f"reading Parquet and Arrow needs pyarrow ({error}): pip install 'solrl[parquet]'") from error
    is_parquet = path.suffix.lower() == ".parquet"
    number = 0
    for batch in parquet.ParquetFile(path).iter_batches() if is_parquet else ipc.open_stream(path):
        kept = [name for name, kind in zip(batch.schema.names, batch.schema.types, strict=True) if _plain(kind)]
        for fields in batch.select(kept).to_pylist():
            number += 1
            yield f"{path}, row {number}", fields


def _plain(kind: Any) -> bool:
    text = str(kind)
    return not any(part in text for part in ("binary", "timestamp", "date", "time", "duration", "decimal"))


_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".txt": _text,
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _separated,
    ".tsv": _separated,
    ".parquet": _table,
    ".arrow": _table,
}
