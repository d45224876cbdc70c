"""Rows of data sets of prompts: text, JSON lines, CSV, TSV, Parquet, and saved Hugging Face data sets."""

import csv
import io
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from solrl_proto.text_files import LARGEST, parse_json, read_json, read_lines, read_text

logger = logging.getLogger(__name__)

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
        ValueError: another kind of file, a text file of more than LARGEST bytes, a row that has no fields, a column
            twice, or a folder without the split; names the place.
        OSError: the file cannot be read.
    """
    if path.is_dir():
        for file in _files_of(path, split):
            yield from rows_of(file, split)
        return
    if (read := _READERS.get(path.suffix.lower())) is None:
        raise ValueError(f"got {path}; expected a file of {', '.join(_READERS)}, or a folder of a saved data set")
    if path.exists() and not path.is_file():
        raise ValueError(f"got {path}, which is a device or a pipe; expected a file")
    yield from read(path)


def prompts_of(rows: Iterable[Row], key: str | None = None) -> Iterator[PromptRow]:
    """Rows with their prompt: the field `key`, or the first of KEYS in the first row. ValueError: a row has none."""
    for place, fields in rows:
        key = _prompt_key(fields, place, key)
        metadata = dict(fields)
        yield place, metadata.pop(key), metadata


def _prompt_key(fields: Mapping[str, Any], place: str, key: str | None) -> str:
    if key is None:
        folded = {name.strip().lower(): name for name in reversed(list(fields))}
        key = next((folded[name] for name in KEYS if name in folded), None)
    if key is None or key not in fields:
        expected = f"{key!r}" if key else f"one of {', '.join(KEYS)}, or --key NAME"
        raise ValueError(f"{place}: got the fields {', '.join(map(str, fields)) or 'none'}; expected {expected}")
    return key


def _files_of(folder: Path, split: str) -> list[Path]:
    """Data files of one split: in a folder of that name, or of a name that says this split and no other."""
    inner = next((folder / name for name in (split, "data") if (folder / name).is_dir()), folder)
    files = sorted(path for path in inner.iterdir() if path.suffix.lower() in _READERS and path.name not in _DESCRIBING)
    named = [path for path in files if re.fullmatch(re.escape(split) + _SHARD, path.name.partition(".")[0])]
    files_of_split = files if inner.name == split or (inner / "dataset_info.json").is_file() else named
    if not files_of_split:
        there = sorted(path.name for path in folder.iterdir())
        raise ValueError(
            f"got {folder} with {', '.join(there[:8]) or 'nothing'}; expected files of the split {split!r}"
        )
    return files_of_split


_SHARD = r"(_metadata)?([-_]\d+(-of-\d+)?)?(-[0-9a-f]{16})?"
"""What may follow the split in a file's name: `train-00000-of-00002-0123456789abcdef.parquet`."""
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


def _separated(path: Path, delimiter: str) -> Iterator[Row]:
    csv.field_size_limit(LARGEST)  # a cell is at most as long as its file: what remains are errors of quotes
    table = csv.reader(io.StringIO(read_text(path), newline=""), delimiter=delimiter, strict=True)
    try:
        yield from _with_header((f"{path}:{table.line_num}", cells) for cells in table if cells)
    except csv.Error as error:
        raise ValueError(f'{path}:{table.line_num}: {error}; write a "cat" as "a ""cat"""') from error


def _with_header(lines: Iterable[tuple[str, list[str]]]) -> Iterator[Row]:
    names: list[str] = []
    for place, cells in lines:
        if not names:
            names = _unique(cells, place)
        elif len(cells) != len(names):
            raise ValueError(f"{place}: got {len(cells)} cells; expected {len(names)}, as in the first line")
        else:
            yield place, dict(zip(names, cells, strict=True))


def _unique(names: list[str], place: object) -> list[str]:
    if doubled := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"{place}: got the column {doubled[0]!r} twice; expected it once: rename or remove one")
    return names


def _table(path: Path) -> Iterator[Row]:
    """Rows of Parquet or of an Arrow stream, without columns that JSON has no form for, such as images.

    NaN is None: tables without a missing value write it so.
    """
    try:
        import pyarrow
        from pyarrow import ipc, parquet
    except ImportError as error:
        raise ValueError(f"reading Parquet and Arrow needs pyarrow ({error}): pip install 'solrl[parquet]'") from error
    try:
        is_parquet = path.suffix.lower() == ".parquet"
        source = parquet.ParquetFile(path) if is_parquet else ipc.open_stream(path)
        plain = _plain_columns(getattr(source, "schema_arrow", source.schema), path)
        batches = source.iter_batches(1024, columns=plain) if is_parquet else source
        rows = (fields for batch in batches for fields in batch.select(plain).to_pylist())
        for number, fields in enumerate(rows, 1):
            yield f"{path}, row {number}", {name: _without_nan(value) for name, value in fields.items()}
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: {error}") from error


def _plain_columns(schema: Any, path: Path) -> list[str]:
    """Names of the columns that JSON has a form for; a warning names all other columns."""
    _unique(schema.names, path)
    plain = [name for name, kind in zip(schema.names, schema.types, strict=True) if _plain(kind)]
    if dropped := sorted(set(schema.names) - set(plain)):
        logger.warning(f"{path}: columns that JSON has no form for are left out: {', '.join(dropped)}")
    return plain


def _plain(kind: Any) -> bool:
    """Whether JSON has a form for an Arrow type: numbers, texts, and lists and objects of them."""
    from pyarrow import types

    if types.is_dictionary(kind):
        return _plain(kind.value_type)
    if types.is_nested(kind):
        return not types.is_union(kind) and all(_plain(kind.field(index).type) for index in range(kind.num_fields))
    tests = (types.is_null, types.is_boolean, types.is_integer, types.is_floating)
    return str(kind) in ("string", "large_string", "string_view") or any(test(kind) for test in tests)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".txt": _text,
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": partial(_separated, delimiter=","),
    ".tsv": partial(_separated, delimiter="\t"),
    ".parquet": _table,
    ".arrow": _table,
}
