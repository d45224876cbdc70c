"""Pictures in terminals that show them, by the protocols of kitty, iTerm2 and sixel."""

import base64
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from rich.console import Console, ConsoleOptions
from rich.segment import ControlType, Segment

Protocol = Literal["kitty", "iterm", "sixel"]
_CELL = 10, 20
"""Assumed width and height of a character in pixels, for sixel, whose pictures have no size in characters."""
_CHUNK = 4096
"""Most bytes of a message of kitty's."""
_COLOURS = 64


def protocol_of(environment: Mapping[str, str]) -> Protocol | None:
    """The protocol of the terminal that these variables describe; None if it has none, or a multiplexer is between."""
    term, program = environment.get("TERM", ""), environment.get("TERM_PROGRAM", "")
    if "TMUX" in environment or term.startswith(("screen", "tmux")):
        return None
    if "KITTY_WINDOW_ID" in environment or term in ("xterm-kitty", "xterm-ghostty"):
        return "kitty"
    if program in ("iTerm.app", "WezTerm"):
        return "iterm"
    return "sixel" if term.startswith(("foot", "mlterm", "contour")) else None


@dataclass(frozen=True)
class Picture:
    """A sequence of a terminal's, as rich prints it: nothing outside a terminal."""

    sequence: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        yield Segment(self.sequence, None, [(ControlType.CARRIAGE_RETURN,)])


def picture(images: torch.Tensor, protocol: Protocol, *, indent: int, columns: int) -> Picture:
    """Images uint8 [N, H, W, 3] in a row.

    Args:
        images: all of one size.
        protocol: of the terminal.
        indent: columns before the first image.
        columns: of each image, of which the last is a gap.
    """
    count, height, width = images.shape[:3]
    rows = max(1, round((columns - 1) * height / width / 2))
    size = (columns - 1) * _CELL[0], rows * _CELL[1]
    strip = np.zeros((size[1], count * columns * _CELL[0], 4), np.uint8)
    for index, image in enumerate(images.numpy()):
        left = index * columns * _CELL[0]
        scaled = Image.fromarray(image).convert("RGBA").resize(size, Image.Resampling.BICUBIC)
        strip[:, left : left + size[0]] = np.asarray(scaled)
    draw = {"kitty": _kitty, "iterm": _iterm, "sixel": _sixel}[protocol]
    return Picture(f"{' ' * indent}{draw(strip, count * columns, rows)}\r\n")


def _png(pixels: npt.NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    return buffer.getvalue()


def _kitty(pixels: npt.NDArray[np.uint8], columns: int, rows: int) -> str:
    data = base64.b64encode(_png(pixels)).decode()
    parts = [data[start : start + _CHUNK] for start in range(0, len(data), _CHUNK)]
    heads = [f"a=T,f=100,q=2,c={columns},r={rows}," if not index else "" for index in range(len(parts))]
    more = [int(index + 1 < len(parts)) for index in range(len(parts))]
    return "".join(f"\x1b_G{head}m={m};{part}\x1b\\" for head, m, part in zip(heads, more, parts, strict=True))


def _iterm(pixels: npt.NDArray[np.uint8], columns: int, rows: int) -> str:
    data = base64.b64encode(_png(pixels)).decode()
    return f"\x1b]1337;File=inline=1;width={columns};height={rows};preserveAspectRatio=0:{data}\a"


def _sixel(pixels: npt.NDArray[np.uint8], columns: int, rows: int) -> str:
    opaque = pixels[..., 3] > 0
    drawn = Image.fromarray(np.ascontiguousarray(pixels[..., :3])).quantize(_COLOURS)
    palette, indices = drawn.getpalette() or [], np.asarray(drawn)
    used = np.unique(indices[opaque])
    rgb = np.round(np.array(palette).reshape(-1, 3) / 2.55).astype(int)
    parts = [f"#{colour};2;" + ";".join(map(str, rgb[colour])) for colour in used]
    for top in range(0, len(pixels), 6):
        band, there = indices[top : top + 6], opaque[top : top + 6]
        weights = (1 << np.arange(len(band)))[:, None]
        lines = []
        for colour in used:
            bits = (((band == colour) & there) * weights).sum(0)
            if bits.any():
                lines.append(f"#{colour}" + "".join(chr(63 + bit) for bit in bits))
        parts.append("$".join(lines) + "-")
    return f'\x1bP0;1;0q"1;1;{pixels.shape[1]};{pixels.shape[0]}{"".join(parts)}\x1b\\'
