"""Finished runs beside the page, in one archive: the tables can be written again from it, or continued."""

import gzip
import tarfile
from collections.abc import Iterable
from pathlib import Path

from paper.finished import FINISHED

ARCHIVE = Path("paper/finished.tar.gz")


def store(names: Iterable[str], folder: Path, out: Path) -> None:
    """Write the files of these runs to the archive in `out`; equal runs give an equal archive.

    The archive keeps its other runs, such as those of a model that this command's tables leave out, if `folder` has
    their files.
    """
    target = out / ARCHIVE
    own = {folder / FINISHED / f"{name}.json" for name in names}
    earlier = {folder / name for name in _names(target)} if target.is_file() else set()
    paths = sorted(own | {path for path in earlier if path.is_file()})
    if not paths:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    with (
        partial.open("wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for path in paths:
            about = tarfile.TarInfo(f"{FINISHED}/{path.name}")
            about.size = path.stat().st_size
            with path.open("rb") as content:
                archive.addfile(about, content)
    partial.replace(target)


def _names(archive: Path) -> list[str]:
    with tarfile.open(archive) as opened:
        return opened.getnames()


def take_stored(out: Path, folder: Path) -> None:
    """Unpack the archive in `out` to the folder of the runs; a run that is there already stays as it is.

    Raises:
        FileNotFoundError: `out` has no archive.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(out / ARCHIVE) as archive:
        new = [one for one in archive.getmembers() if not (folder / one.name).exists()]
        archive.extractall(folder, members=new, filter="data")
