"""Leaves an activation function to the FP8 layer after it, which computes it in the pass that quantises its input."""

from torch import Tensor, nn

from solrl_core.precision.fp8 import Fp8Linear


class Projection(nn.Module):
    """The projection of a diffusers `GELU`, without the activation."""

    def __init__(self, proj: nn.Module) -> None:
        super().__init__()
        self.proj = proj

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] → [..., out]."""
        out: Tensor = self.proj(x)
        return out


def fuse_feed_forwards(transformer: nn.Module) -> None:
    """In every diffusers `FeedForward` with a tanh-GELU and an FP8 layer after it, leave the GELU to that layer."""
    from diffusers.models.activations import GELU
    from diffusers.models.attention import FeedForward

    for module in transformer.modules():
        if isinstance(module, FeedForward):
            first, last = module.net[0], module.net[2]
            if isinstance(first, GELU) and first.approximate == "tanh" and isinstance(last, Fp8Linear):
                module.net[0] = Projection(first.proj)
                last.activation = "gelu_tanh"
