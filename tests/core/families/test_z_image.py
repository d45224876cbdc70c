"""Z-Image: its prompts and its compiled blocks."""

import pytest
import torch
from diffusers.models.transformers.transformer_z_image import ZImageTransformerBlock
from solrl_core.families.z_image import ZImage
from solrl_core.families.z_image_fused import ZImageFusedBlock
from solrl_core.precision import LayerPolicy, apply_policy
from tiny_models import Tiny, variants
from tiny_pipelines import PROMPTS, QWEN_TOKENS, difference
from torch._dynamo.testing import CompileCounterWithBackend


@variants("z-image")
def test_padding_holds_nothing(tiny: Tiny) -> None:
    rows = tiny.backbone.encode(PROMPTS)
    assert not rows["states"][rows["mask"] == 0].any()


@variants("z-image")
def test_tokens_beyond_the_limit_are_not_read(tiny: Tiny) -> None:
    backbone = tiny.backbone
    # The tokenizer has a token for each letter; 6 come before the prompt: the start of the message, user and newline.
    fits = "a" * (QWEN_TOKENS - 6)
    assert backbone.truncated_tokens([*PROMPTS, fits, fits + "bcd"]) == [0, 0, 0, 3]
    one, other = (backbone.encode([text])["states"] for text in (fits, fits + "bcd"))
    assert torch.equal(one, other)


@pytest.mark.release
@pytest.mark.usefixtures("fp8_in_float32")
def test_blocks_compile_for_any_number_of_tokens() -> None:
    """The first number of tokens has its own graph; all others share one."""
    block = ZImageFusedBlock(ZImageTransformerBlock(0, 48, 3, 3, 1e-5, qk_norm=True, modulation=False))
    apply_policy(block, LayerPolicy(quantize=("",)), "fp8")
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, backend=graphs, dynamic=False if ZImage.one_length else None, fullgraph=True)
    for tokens in (32, 64, 96, 128):
        x, angles = torch.randn(2, tokens, 48), torch.randn(2, tokens, 8, 2)
        with torch.no_grad():
            expected = block(x, None, angles)
            assert difference(compiled(x, None, angles), expected) <= 1e-4 * float(expected.abs().max())
    assert graphs.frame_count == 2
