"""A run's output folder: only one process at a time writes to it, and config.json has the run's settings."""

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from pydantic import ValidationError
from solrl_proto.text_files import naming, read_json

from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.presets import ConfigError, config_error

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
        ValueError: as `check_entries`.
        OSError: the folder cannot be created or written to.
    """
    with naming(f"--output {folder}", _OUTPUT):
        check_entries(folder)
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+", encoding="utf-8")
    with file:
        _lock(file, folder)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def _lock(file: TextIO, folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
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


def check_entries(folder: Path) -> None:
    """Refuse a run's folder with a link, pipe or device in it, by a ValueError with the first; opens nothing.

    Otherwise, somebody else's folder could have a run overwrite or delete what its links lead to, or read without end.
    """
    folders = [place for place in (folder, folder / "checkpoints", folder / "evaluation") if place.is_dir()]
    for path in (path for place in folders for path in sorted(place.iterdir())):
        mode = path.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise ValueError(
                f"{path} is a {'link' if stat.S_ISLNK(mode) else 'pipe, socket or device'}; expected only files and "
                "folders in a run's folder: a run writes through what is there. Put a copy in its place, or remove it"
            )


def check_new(folder: Path) -> None:
    """Refuse a folder that already contains a run, by a FileExistsError."""
    if (folder / "checkpoints").exists():
        raise FileExistsError(
            f"{folder} already contains a run; continue it with `solrl-train run --resume {folder}`, "
            "or choose another --run or --output"
        )


def check_run_folder(folder: Path) -> None:
    """Refuse a folder without a run, by a FileNotFoundError, and one with a link or pipe in it, by a ValueError."""
    check_entries(folder)
    if not (folder / SETTINGS).is_file():
        raise FileNotFoundError(f"{folder} contains no run (no {SETTINGS}); expected an --output of `solrl-train run`")


def saved_settings(folder: Path) -> RunConfig:
    """Settings of the run in a folder, with this folder as its output, even if it was moved.

    FileNotFoundError: there is no run; ValueError: a link or pipe is in it; ConfigError: its settings cannot be read.
    """
    check_run_folder(folder)
    path = folder / SETTINGS
    try:
        settings = RunConfig.model_validate(read_json(path))
    except ValidationError as error:
        raise config_error(error, {key: str(path) for key in RunConfig.model_fields}) from error
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read as settings: {error}") from error
    return settings.model_copy(update={"output": folder})
