"""Judge of the shapes world: a learned detector that reads the objects of an image, and a comparison with the prompt.

No reward has seen it. It learned from rendered scenes and their ground truth alone, by
`benchmarks/minis_recipe/detection.py`. It labelled and graded nothing that a reward was trained on, and it shares no
code with the verifier.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import torch as safetensors
from solrl_core.fingerprint import combined_digest, module_digest, source_digest
from solrl_core.rewards.reward import checks_prompts
from torch import nn

from solrl_minis.catalog import WEIGHTS
from solrl_minis.scenes import SIDE, SIZE_RADII
from solrl_minis.world import COLOURS, SHAPES, check_metadata

CELL = 4
"""Pixels between two cells of the detector's maps, in each direction."""
FIELDS = {"object": 1, "shape": len(SHAPES) + 1, "colour": len(COLOURS) + 1, "offset": 2, "side": 1}
"""Maps of the detector → channels. The last shape and the last colour mean that an object has none of the world's."""
LARGE_FROM = SIZE_RADII["small"][1] + SIZE_RADII["large"][0]
"""Least side in pixels of a large object: halfway between the world's largest small and smallest large one."""
SEEN = 0.3
"""Least probability of an object's cell. Less probable objects are ignored."""
CONFIDENT = 0.5
"""Least probability of a readable object with its colour and shape. An unreadable object makes its image wrong."""
WEIGHTS_FILE = "model.safetensors"

_BATCH = 64


class Detector(nn.Module):
    """Fully convolutional network that describes the object in each cell of 4 × 4 pixels, if there is one."""

    def __init__(self, width: int = 48, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width // 2, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Conv2d(width // 2, width // 2, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(width // 2, width, 3, stride=2, padding=1),
        )
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.GroupNorm(8, width),
                nn.Conv2d(width, width, 3, padding=1),
                nn.SiLU(),
                nn.Conv2d(width, width, 3, padding=1),
            )
            for _ in range(blocks)
        )
        self.norm = nn.GroupNorm(8, width)
        self.head = nn.Conv2d(width, sum(FIELDS.values()), 1)

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        """Describe images [N, 3, H, W] in [0, 1] by maps [N, channels, H / 4, W / 4], see `FIELDS`.

        `object`, `shape` and `colour` are logits. `offset` is the distance in cells from the cell's centre to the
        object's, x and y; `side` is the logarithm of the side in cells.
        """
        x = self.stem(2 * images - 1)
        for block in self.blocks:
            x = x + block(x)
        maps = torch.split(self.head(F.silu(self.norm(x))), list(FIELDS.values()), 1)
        return dict(zip(FIELDS, maps, strict=True))


@dataclass(frozen=True)
class ReadObject:
    """An object as the judge reads it.

    Attributes:
        colour, shape: names in the world; None for any other.
        x, y, side: centre and side, in pixels.
        confidence: probability that there is an object with this colour and this shape.
    """

    colour: str | None
    shape: str | None
    x: float
    y: float
    side: float
    confidence: float


@torch.no_grad()
def read(detector: Detector, images: torch.Tensor) -> list[list[ReadObject]]:
    """Objects in each of the images [N, 3, H, W] in [0, 1]: the cells that are more probable than their neighbours."""
    maps = detector(images)
    objects = maps["object"].sigmoid()
    there, highest = objects[:, 0], F.max_pool2d(objects, 3, 1, 1)[:, 0]
    peaks = (there == highest) & (there >= SEEN)
    (shape_p, shape), (colour_p, colour) = (maps[name].softmax(1).max(1) for name in ("shape", "colour"))
    confidence = there * shape_p * colour_p
    image, row, column = peaks.nonzero().unbind(1)
    cells = (image, slice(None), row, column)
    x, y = (maps["offset"][cells] + torch.stack((column, row), 1) + 0.5).mul(CELL).unbind(1)
    side = CELL * maps["side"][cells][:, 0].exp()
    read_out = (image, colour[peaks], shape[peaks], x, y, side, confidence[peaks])
    per_image: list[list[ReadObject]] = [[] for _ in images]
    for number, colour_of, shape_of, *measured in zip(*(values.tolist() for values in read_out), strict=True):
        per_image[number].append(ReadObject((*COLOURS, None)[colour_of], (*SHAPES, None)[shape_of], *measured))
    return per_image


def shows(objects: Sequence[ReadObject], metadata: Mapping[str, Any]) -> bool:
    """Whether these are exactly the objects of GenEval-style metadata, in the relation and size that it states.

    Raises:
        PromptError: the metadata does not describe a scene of the shapes world.
    """
    check_metadata(metadata)
    include = metadata["include"]
    expected = Counter((item["color"], item["class"]) for item in include for _ in range(item["count"]))
    combinations = [(detected.colour, detected.shape) for detected in objects]
    if any(detected.confidence < CONFIDENT for detected in objects) or Counter(combinations) != expected:
        return False
    read_as = dict(zip(combinations, objects, strict=True))
    for item in include:
        subject = read_as[item["color"], item["class"]]
        if "size" in item and (subject.side >= LARGE_FROM) != (item["size"] == "large"):
            return False
        if "position" in item:
            relation, index = item["position"]
            anchor = read_as[include[index]["color"], include[index]["class"]]
            if not _is(relation, subject.x - anchor.x, subject.y - anchor.y):
                return False
    return True


def _is(relation: str, dx: float, dy: float) -> bool:
    """Whether an object (dx, dy) pixels from another is mainly in that direction; y points down."""
    ways = {"left of": (-dx, dy), "right of": (dx, dy), "above": (-dy, dx), "below": (dy, dx)}
    along, across = ways[relation]
    return along > abs(across)


def load(folder: Path, device: str = "cpu") -> Detector:
    """Load a trained detector in float32.

    Raises:
        OSError: the folder has no weights.
        ValueError: the weights do not fit `Detector`.
    """
    with torch.device("meta"):  # no random numbers, which a run would miss
        detector = Detector()
    file = folder / WEIGHTS_FILE
    try:
        detector.load_state_dict(safetensors.load_file(file), assign=True)
    except RuntimeError as error:
        raise ValueError(f"{file} has other weights than the judge: {error}") from error
    return detector.to(device, torch.float32).eval().requires_grad_(False)


def save(detector: Detector, folder: Path) -> None:
    """Save a detector in BF16."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().to("cpu", torch.bfloat16) for name, value in detector.state_dict().items()}
    # save_file would create a file that only its owner can read.
    (folder / WEIGHTS_FILE).write_bytes(safetensors.save(weights))


@checks_prompts(lambda text, metadata: check_metadata(metadata))
class Judge:
    """Reward "judge": 1 if the image shows exactly the objects in its metadata, each read with confidence, otherwise 0.

    Args:
        model: folder of the detector, by default the shipped one.
        device: device of the detector.

    Attributes:
        digest: digest of the weights and of the rules.

    Raises:
        OSError: the folder has no weights.
        ValueError: the weights do not fit `Detector`.
    """

    parameters = 142_168
    """Parameters of the detector, for memory plans."""

    def __init__(self, model: str = str(WEIGHTS / "mini-judge"), *, device: str = "cpu") -> None:
        self._detector, self._device = load(Path(model), device), device
        self.digest = combined_digest(module_digest(self._detector), source_digest(self))

    def __call__(
        self, images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> torch.Tensor:
        """Judge images [N, 3, 64, 64] in [0, 1], each by its own metadata; float32 [N].

        Raises:
            ValueError: images of another size, or the numbers of images and rows of metadata differ.
        """
        if images.shape[-2:] != (SIDE, SIDE):
            raise ValueError(f"got images of {tuple(images.shape[-2:])} pixels; expected {SIDE} × {SIDE}")
        pixels = images.detach().to(self._device, torch.float32)
        detections = [objects for part in torch.split(pixels, _BATCH) for objects in read(self._detector, part)]
        return torch.tensor([float(shows(objects, item)) for objects, item in zip(detections, metadata, strict=True)])
