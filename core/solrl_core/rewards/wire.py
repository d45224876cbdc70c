"""Images and a request for their scores as one safetensors file, and back. Nothing is pickled."""

import json

import torch
from safetensors.torch import load, save
from solrl_proto.json_size import MAX_PARSED_BYTES, parsed_bytes
from solrl_proto.scores import IMAGES_TENSOR, MAX_SCORED_RATIO, MAX_SCORED_SIDE, REQUEST_FIELD, ScoreRequest

MAX_HEADER_BYTES = 16 * 2**20
"""The metadata of 256 prompts may have 4 MiB."""


def encode_scoring(images: torch.Tensor, request: ScoreRequest) -> bytes:
    """Encode images, uint8 [N, 3, H, W], or clips, uint8 [N, F, 3, H, W], with the request for their scores."""
    # Without defaults, which an older server may not know.
    text = request.model_dump_json(exclude_defaults=True)
    body: bytes = save({IMAGES_TENSOR: images.cpu().contiguous()}, metadata={REQUEST_FIELD: text})
    return body


def decode_scoring(body: bytes) -> tuple[torch.Tensor, ScoreRequest]:
    """Decode a request for scores and its images or clips, uint8 [N, 3, H, W] or [N, F, 3, H, W], one for each prompt.

    Raises:
        pydantic.ValidationError: the request is not valid.
        ValueError: the body is no such file, or its images are not such images; the message has the expected form.
    """
    length = int.from_bytes(body[:8], "little")
    if length > min(MAX_HEADER_BYTES, len(body) - 8):
        raise ValueError(f"a header of {length} bytes in a file of {len(body)}; expected a safetensors file")
    header = body[8 : 8 + length]
    if (parsed := parsed_bytes(header)) > MAX_PARSED_BYTES:
        raise ValueError(
            f"a header of {length} bytes that would take about {parsed} once it is parsed; expected at most "
            f"{MAX_PARSED_BYTES}: send fewer images at a time, with less metadata"
        )
    try:
        tensors = load(body)
        # After safetensors, which has checked the header's structure.
        metadata = json.loads(header).get("__metadata__") or {}
    except Exception as error:  # safetensors raises several kinds
        raise ValueError(f"{str(error)[:200]}; expected a complete safetensors file") from None
    request = ScoreRequest.model_validate_json(metadata.get(REQUEST_FIELD, ""))
    if tensors.keys() != {IMAGES_TENSOR}:
        raise ValueError(f"tensors {sorted(tensors)[:5]}; expected one, called {IMAGES_TENSOR!r}")
    images = tensors[IMAGES_TENSOR]
    if images.dtype != torch.uint8 or images.ndim not in (4, 5) or images.shape[-3] != 3 or not images.numel():
        raise ValueError(
            f"images of {images.dtype} and shape {list(images.shape)}; expected uint8 [N, 3, H, W] or [N, F, 3, H, W]"
        )
    short, long = sorted(images.shape[-2:])
    if long > min(MAX_SCORED_SIDE, MAX_SCORED_RATIO * short):
        raise ValueError(
            f"images of {images.shape[-2]} × {images.shape[-1]} pixels; expected sides of at most {MAX_SCORED_SIDE}, "
            f"the longer at most {MAX_SCORED_RATIO} times the shorter"
        )
    if len(images) != len(request.prompts):
        raise ValueError(f"{len(images)} images and {len(request.prompts)} prompts; expected one prompt per image")
    return images, request
