"""Files of stored images that a run trains on, by the prompts whose metadata names them."""

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from solrl_proto.rollouts import PromptItem

from solrl_trainer.prompts.image_reader import image_size, same_shape
from solrl_trainer.prompts.prompt_sets import find_prompts, prompts_of_run
from solrl_trainer.prompts.prompt_source import PromptSource

_IMAGE = ("file_name", "image")


def stored_files(sources: Mapping[str, PromptSource], kind: str) -> dict[str, tuple[Path, ...]]:
    """Id of each training prompt → its image, or its better and its worse image; none if `kind` is "model".

    `sources`, and errors about them: see `prompts_of_run`. A ValueError names a prompt without images, or a file that
    does not exist.
    """
    if kind == "model":
        return {}
    files = {}
    for name, prompts in zip(sources, prompts_of_run(sources, "train").sources, strict=True):
        folder = find_prompts(name)
        for prompt in prompts:
            names = _pair(prompt) if kind == "pairs" else _image(prompt)
            if len(set(names)) < len(names):
                raise _fault(prompt, f"names {names[0]!r} as the better and as the worse image; expected two images")
            files[prompt.id] = tuple(_file(folder, image, prompt) for image in names)
    return files


def check_images(files: Mapping[str, tuple[Path, ...]]) -> None:
    """Check the headers of all images, before anything is loaded; raises the ValueError of `image_size`.

    Another ValueError names the images of a pair that have different shapes, so that each would be cropped its own way.
    """
    for paths in files.values():
        sizes = [image_size(path) for path in paths]
        if not same_shape(sizes[0], sizes[-1]):
            (width, height), (wide, high) = sizes
            raise ValueError(
                f"{paths[0]} has {width}×{height} pixels, and {paths[1].name} of the same pair has {wide}×{high}; "
                "expected one shape: crop both to it, or leave out the pair"
            )


def contents_digest(files: Mapping[str, tuple[Path, ...]]) -> str:
    """Digest of the names and contents of all images, in the order of the prompts."""
    stats = [(path, path.stat()) for paths in files.values() for path in paths]
    return _contents(tuple((path, stat.st_mtime_ns, stat.st_size) for path, stat in stats))


@lru_cache(maxsize=2)  # a run that is resumed asks twice, and large sets take minutes
def _contents(files: tuple[tuple[Path, int, int], ...]) -> str:
    digests = []
    for path, *_ in files:
        with path.open("rb") as file:
            digests.append([path.name, hashlib.file_digest(file, "sha256").hexdigest()])
    return "sha256:" + hashlib.sha256(json.dumps(digests).encode()).hexdigest()


def _image(prompt: PromptItem) -> tuple[str]:
    for field in _IMAGE:
        if name := prompt.metadata.get(field):
            return (str(name),)
    raise _fault(prompt, f"has the fields {_fields(prompt)}; expected file_name or image, with a file")


def _pair(prompt: PromptItem) -> tuple[str, str]:
    """The better image and the worse one; Pick-a-Pic says by `label_0` which is which."""
    fields = prompt.metadata
    if fields.get("chosen") and fields.get("rejected"):
        return str(fields["chosen"]), str(fields["rejected"])
    if fields.get("jpg_0") and fields.get("jpg_1"):
        if (label := fields.get("label_0")) not in (0, 1):
            raise _fault(prompt, f"has label_0 {label!r}; expected 1 if jpg_0 is better, or 0; leave out ties")
        first, second = str(fields["jpg_0"]), str(fields["jpg_1"])
        return (first, second) if label else (second, first)
    raise _fault(prompt, f"has the fields {_fields(prompt)}; expected chosen and rejected, or jpg_0, jpg_1 and label_0")


def _file(folder: Path, name: str, prompt: PromptItem) -> Path:
    """A file beside the prompts, or in the folder `train` as of Hugging Face's imagefolder."""
    for path in (folder / name, folder / "train" / name):
        if path.is_file():
            return path
    raise _fault(prompt, f"names the image {name!r}, which is not in {folder}")


def _fields(prompt: PromptItem) -> str:
    return ", ".join(prompt.metadata) or "none"


def _fault(prompt: PromptItem, text: str) -> ValueError:
    return ValueError(f"training prompt {prompt.text[:80]!r} {text}; see explore.source")
