"""A run's output folder: only one process at a time writes to it, and config.json has the run's settings."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from pydantic import ValidationError
from solrl_proto.text_files import naming, read_json

from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.presets import ConfigError, refused

LOCK = ".lock"
SETTINGS = "config.json"
_OUTPUT = "a folder that this user may create and write to; choose another, or change the permissions"


class FolderInUseError(RuntimeError):
    """Another process writes to the folder."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create the folder if necessary, and lock it within the block: no other process may write to it.

    The lock ends with the process, even if it is killed. On a file system without locks there is no lock.

    Raises:
        FolderInUseError: another process has locked it.
        OSError: the folder cannot be created or written to.
    """
    check_writable(folder)
    with naming(f"--output {folder}", _OUTPUT):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+", encoding="utf-8")
    with file:
        _lock(file, fcntl.LOCK_EX, folder)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def _lock(file: TextIO, kind: int, folder: Path) -> None:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read(32).strip()
        named = f" (process {holder})" if holder.isdigit() else ""
        raise FolderInUseError(
            f"{folder} is in use by another process{named}; wait until it ends, or choose another --run or --output"
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise


def check_free(folder: Path) -> None:
    """Refuse a folder as `locked` does; writes nothing.

    Raises:
        FolderInUseError, OSError: as `locked`.
    """
    with suppress(OSError), (folder / LOCK).open(encoding="utf-8") as file:
        _lock(file, fcntl.LOCK_SH, folder)
    check_writable(folder)


def check_writable(folder: Path) -> None:
    """Refuse a folder that this user cannot create or write to; writes nothing.

    Raises:
        OSError: says why.
    """
    with naming(f"--output {folder}", _OUTPUT):
        found = next(one for one in (folder, *folder.absolute().parents) if one.exists())
        if not found.is_dir():
            raise NotADirectoryError(f"{found} is a file")
        if not os.access(found, os.W_OK | os.X_OK):
            raise PermissionError(f"this user may not write to {found}")


def check_new(folder: Path) -> None:
    """Refuse a folder that already contains a run.

    Raises:
        FileExistsError: it contains a run.
    """
    if (folder / "checkpoints").exists():
        raise FileExistsError(
            f"{folder} already contains a run; continue it with `solrl-train run --resume {folder}`, "
            "or choose another --run or --output"
        )


def saved_settings(folder: Path) -> RunConfig:
    """Settings of the run in a folder, with this folder as its output, even if it was moved.

    Raises:
        FileNotFoundError: the folder contains no run.
        ConfigError: its settings cannot be read.
    """
    path = folder / SETTINGS
    if not path.is_file():
        raise FileNotFoundError(f"{folder} contains no run (no {SETTINGS}); expected an --output of `solrl-train run`")
    try:
        settings = RunConfig.model_validate(read_json(path))
    except ValidationError as error:
        raise refused(error, {key: str(path) for key in RunConfig.model_fields}) from error
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read as settings: {error}") from error
    return settings.model_copy(update={"output": folder})
