"""Published models by their true configurations, without weights: sizes, quantised layers, layers that LoRA adapts.

docs/precision.md has reasons for the layers at NVFP4. Layers of LoRA are those of Sol-RL for the models that it
trains (SANA, SD3.5-Large, FLUX.1), of the others those of the baselines: Flow-Factory for FLUX.2 [klein], verl-omni for
Qwen-Image, UniRL for Z-Image.
"""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from solrl_core.families.load import pipeline_call
from solrl_core.families.skeleton import Meta, load_skeleton
from solrl_core.lora import adapter_layout
from tests.core.families.tiny_models import MODELS, named_layers
from tests.support.true_shapes import write_skeleton

PROJECTIONS = ("to_q", "to_k", "to_v")
ATTENTION = (*PROJECTIONS, "to_out.0")
JOINT = (*ATTENTION, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
FEED_FORWARD = ("net.0.proj", "net.2")


def within(part: str, layers: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{part}.{layer}" for layer in layers)


@dataclass(frozen=True)
class Published:
    """What is known of a model; `tiny` is one of its family.

    Attributes:
        size: default height and width in pixels, and frames.
        tokens: the pipeline's argument `max_sequence_length`.
        quantised: numbers of blocks with a layer at NVFP4, by its name without the block's number.
        shares: of the blocks' linear FLOPs, at NVFP4 and at FP8.
        adapted: ends of the names of adapted layers, as PEFT reads a list of targets.
        adapters: number of adapted layers.
    """

    tiny: str
    quantised: dict[tuple[str, ...], int]
    adapted: tuple[str, ...]
    adapters: int
    size: int | tuple[int, int, int] = 512
    tokens: int = 512
    shares: tuple[float, float] = (1.0, 1.0)


def wan(blocks: int) -> Published:
    attention = (*within("attn1", ATTENTION), *within("attn2", ATTENTION))
    return Published(
        tiny="wan/2.1",
        size=(480, 832, 33),
        quantised={within("blocks", (*attention, *within("ffn", FEED_FORWARD))): blocks},
        adapted=attention,
        adapters=blocks * 8,
    )


DOUBLE, SINGLE = "transformer_blocks", "single_transformer_blocks"
PUBLISHED = {
    "flux": Published(
        tiny="flux/dev",
        tokens=128,
        quantised={
            within(DOUBLE, within("attn", JOINT)): 19,
            within(DOUBLE, (*within("ff", FEED_FORWARD), *within("ff_context", FEED_FORWARD))): 19,
            within(SINGLE, ("proj_mlp", "proj_out", *within("attn", PROJECTIONS))): 38,
        },
        shares=(0.9996, 0.9996),
        **{"adapted": within("attn", ATTENTION), "adapters": 19 * 4 + 38 * 3},
    ),
    # Attention is 2432 wide, which the paper's list keeps; the last block has no text output.
    "sd3": Published(
        **{"tiny": "sd3/3.5", "size": 1024, "tokens": 128},
        quantised={within(DOUBLE, within("ff", FEED_FORWARD)): 38},
        shares=(0.635, 0.9998),
        **{"adapted": within("attn", JOINT), "adapters": 38 * 8 - 1},
    ),
    # The second attention of 13 blocks is kept as the first is, and adapted no more than DiffusionNFT and Flow-GRPO do.
    "sd3-medium": Published(
        tiny="sd3/3.5",
        tokens=128,
        quantised={within(DOUBLE, within("ff", FEED_FORWARD)): 24},
        shares=(0.485, 0.999),
        **{"adapted": within("attn", JOINT), "adapters": 24 * 8 - 1},
    ),
    # Of the authors' larger layers, the list keeps attn.qkv and those of at most 2240 features.
    "sana": Published(
        **{"tiny": "sana/mini", "size": 1024, "tokens": 300},
        quantised={within(DOUBLE, ("attn2.to_k", "attn2.to_v", "ff.conv_inverted", "ff.conv_point")): 20},
        shares=(0.574, 1.0),
        adapted=(*within("attn1", ATTENTION), *within("attn2", ATTENTION)),
        adapters=20 * 8,
    ),
    "qwen-image": Published(
        tiny="qwen-image/base",
        tokens=256,
        quantised={
            within(DOUBLE, within("attn", JOINT)): 60,
            within(DOUBLE, ("img_mlp.net.0.proj", *within("txt_mlp", FEED_FORWARD))): 60,
        },
        shares=(0.733, 0.9992),
        adapted=(*JOINT, *within("img_mlp", FEED_FORWARD), *within("txt_mlp", FEED_FORWARD)),
        adapters=60 * 12,
    ),
    "flux2-klein": Published(
        tiny="flux2-klein/base",
        quantised={
            within(DOUBLE, within("attn", JOINT)): 5,
            within(DOUBLE, ("ff.linear_in", "ff.linear_out", "ff_context.linear_in", "ff_context.linear_out")): 5,
            within(SINGLE, ("attn.to_qkv_mlp_proj", "attn.to_out")): 20,
        },
        adapted=(*within("attn", JOINT), "attn.to_qkv_mlp_proj", "linear_in", "linear_out"),
        adapters=5 * 12 + 20,
    ),
    "wan": wan(30),
    "wan-14b": wan(40),
    "z-image": Published(
        tiny="z-image/static",
        quantised={within("layers", within("feed_forward", ("w1", "w2", "w3"))): 30},
        shares=(0.625, 1.0),
        adapted=within("attention", ATTENTION),
        adapters=34 * 4,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model(name: str, tmp_path: Path) -> None:
    known = PUBLISHED[name]
    folder = write_skeleton(name, MODELS[known.tiny](tmp_path / "tiny"), tmp_path / name)
    model = load_skeleton(str(folder))
    size = known.size if isinstance(known.size, tuple) else (known.size, known.size, 1)
    assert (model.height, model.width, model.frames, model.max_sequence_length) == (*size, known.tokens)
    call = pipeline_call(str(folder), 4.5)
    assert call.get("true_cfg_scale", call.get("guidance_scale")) == (3.5 if name == "z-image" else 4.5)
    selected = Counter(re.sub(r"\.\d+\.", ".", layer, count=1) for layer in model.policy.select(model.transformer))
    assert selected == {layer: blocks for layers, blocks in known.quantised.items() for layer in layers}
    with Meta():
        shares = [model.quantized_share(precision) for precision in ("nvfp4", "fp8")]
    assert shares == pytest.approx(known.shares, abs=0.002)
    layout = adapter_layout(model.transformer, model.lora_targets)
    assert set(layout) == named_layers(model.transformer, known.adapted)
    assert len(layout) == known.adapters
