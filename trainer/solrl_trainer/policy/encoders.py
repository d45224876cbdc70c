"""Text encoders that wait in host memory, for GPUs that need their room while nothing is encoded."""

from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import send_to_device  # type: ignore[import-untyped]
from solrl_core.families.pipeline import PipelineBackbone
from torch import nn

_HOST = torch.device("cpu")


class Encoders:
    """Text encoders of a model. Offloaded ones are on its device only while prompts are encoded.

    An offloaded encoder is onloaded when it is called, and offloaded after the call, or after all calls within
    `encode`. Results equal a staying encoder's, because the same device computes them.
    """

    def __init__(self, backbone: PipelineBackbone, *, offloaded: bool) -> None:
        """Move the encoders to the model's device, or to host memory if they are `offloaded`."""
        self._backbone = backbone
        self._here: set[nn.Module] = set()
        self._encoding = False
        self._offloaded = offloaded
        for encoder in backbone.text_encoders.values():
            encoder.to(_HOST if offloaded else backbone.device)
            if offloaded:
                encoder.register_forward_pre_hook(self._onload, with_kwargs=True)
                encoder.register_forward_hook(self._called, always_call=True)

    def encode(self, prompts: Sequence[str], guidance: float) -> None:
        """Onload offloaded encoders once for all prompts that the cache lacks; staying encoders encode on demand."""
        if not self._offloaded:
            return
        self._encoding = True
        try:
            for prompt in prompts:
                self._backbone.conditioning(prompt, guidance)
        finally:
            self._encoding = False
            self._offload()

    def _onload(self, encoder: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Move the encoder, and its inputs too: some pipelines send them to where it was."""
        if encoder not in self._here:
            encoder.to(self._backbone.device)
            self._here.add(encoder)
        args, kwargs = send_to_device((args, kwargs), self._backbone.device)
        return args, kwargs

    def _called(self, encoder: nn.Module, args: Any, output: Any) -> None:
        if not self._encoding:
            self._offload()

    def _offload(self) -> None:
        for encoder in self._here:
            encoder.to(_HOST)
        self._here.clear()
