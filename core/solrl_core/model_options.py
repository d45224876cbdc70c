"""Settings of a model, from the `solrl.json` in its folder. Imports no model library."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from solrl_proto.text_files import read_json


class ImageSize(NamedTuple):
    """Height and width of an image in pixels, and the frames of a clip; None for the model's own."""

    height: int | None = None
    width: int | None = None
    frames: int | None = None


MODELS_OWN = ImageSize()

_LARGEST = 2**20


def size_text(sized: Any) -> str:
    """Width × height of a model's images, and × frames of its clips; `sized` has these attributes."""
    return f"{sized.width}×{sized.height}" + (f"×{sized.frames}" if sized.frames > 1 else "")


@dataclass(frozen=True)
class ModelOptions:
    """Per-model settings from `solrl.json`, next to its model_index.json; None selects the family's default.

    Attributes:
        height: height of an image in pixels.
        width: width of an image in pixels.
        frames: frames of a clip, for a model that makes clips; one frame is an image.
        max_sequence_length: number of text tokens.
        complex_human_instruction: SANA's prompt prefix; an empty list turns it off.
        quantize: see `LayerPolicy`.
        keep: see `LayerPolicy`.
        keep_max_dim: see `LayerPolicy`.
        rewards: reward name → options of its loader; relative paths start at the folder.
    """

    height: int | None = None
    width: int | None = None
    frames: int | None = None
    max_sequence_length: int | None = None
    complex_human_instruction: list[str] | None = None
    quantize: tuple[str, ...] | None = None
    keep: tuple[str, ...] | None = None
    keep_max_dim: int | None = None
    rewards: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def sized(self, size: ImageSize) -> "ModelOptions":
        """The same with another size of images, where that is given."""
        overrides = {name: value for name, value in size._asdict().items() if value is not None}
        return replace(self, **overrides)


def read_options(folder: str) -> ModelOptions:
    """Read `solrl.json` from a folder; defaults if there is no such file.

    Raises:
        ValueError: the file has an unknown setting or a value of another type, or is not JSON in UTF-8.
    """
    path = Path(folder) / "solrl.json"
    if not path.is_file():
        return ModelOptions()
    settings = read_json(path)
    try:
        for name in ("height", "width", "frames", "max_sequence_length", "keep_max_dim"):
            if (number := settings.get(name)) is not None and (type(number) is not int or not 0 <= number <= _LARGEST):
                raise TypeError(f"got {name} = {number!r}; expected a whole number from 0 to {_LARGEST}")
        for name in ("quantize", "keep"):
            if settings.get(name) is not None:
                settings[name] = tuple(settings[name])
        for options in settings.get("rewards", {}).values():
            for name, value in options.items():
                if isinstance(value, str) and value.startswith((".", "..")):
                    options[name] = str((path.parent / value).resolve())
        return ModelOptions(**settings)
    except (TypeError, AttributeError) as error:
        fields = ", ".join(ModelOptions.__dataclass_fields__)
        raise ValueError(f"{path}: {error}; expected a JSON object with some of: {fields}") from error
