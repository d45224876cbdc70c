"""Contact sheets of held-out images, kept in the run's folder for trackers that are opened later."""

import io
from pathlib import Path

from PIL import Image
from solrl_proto.text_files import read_text

from solrl_trainer.run_folder.folder import SAMPLES
from solrl_trainer.run_folder.output_files import write_file


class Sheets:
    """Sheets of a run by version: `samples/VERSION.webp`, and the caption beside it as text."""

    def __init__(self, output: Path) -> None:
        """`output`: the run's folder."""
        self._folder = output / SAMPLES

    def keep(self, version: int, sheet: Image.Image, caption: str) -> None:
        """Write a version's sheet. Raises OSError as `writing`."""
        self._folder.mkdir(exist_ok=True)
        file = io.BytesIO()
        sheet.save(file, "WEBP", quality=90)
        write_file(self._folder / f"{version:06d}.txt", caption)
        write_file(self._folder / f"{version:06d}.webp", file.getvalue())

    def of(self, version: int) -> tuple[Image.Image, str] | None:
        """A version's sheet and caption; None if there is none that can be read."""
        path = self._folder / f"{version:06d}.webp"
        try:
            with Image.open(path, formats=("WEBP",)) as image:
                return image.convert("RGB"), read_text(path.with_suffix(".txt"))
        except (OSError, ValueError):
            return None

    def rewind(self, version: int) -> None:
        """Delete sheets beyond `version`, from which the run continues."""
        for path in self._folder.glob("[0-9]*.*"):
            if path.stem.isdigit() and int(path.stem) > version:
                path.unlink()
