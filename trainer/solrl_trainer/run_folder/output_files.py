"""Writing files: an error of a full disk says which file it was, and what to do."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)


def write_file(path: Path, content: str | bytes) -> None:
    """Write a whole file, text in UTF-8; `writing` describes the OSError."""
    with writing(path):
        if isinstance(content, str):
            path.write_text(content, encoding="utf-8")
        else:
            path.write_bytes(content)


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a whole file under another name first, so that a process killed here loses nothing of the file before."""
    partial = path.with_name(f"{path.name}.partial")
    write_file(partial, content)
    partial.replace(path)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A block that writes a file; the OSError of a full disk or a used-up quota says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise OSError(
            f"cannot write {path}: {error.strerror}; make room there, then repeat the command. A run loses nothing: "
            "`solrl-train run --resume FOLDER` continues from its last checkpoint"
        ) from error
