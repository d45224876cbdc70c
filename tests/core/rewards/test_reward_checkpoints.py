"""Invalid files and options of rewards are refused; the error says what was got, what was expected, what to do."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from solrl_core.rewards.aesthetic import Aesthetic
from solrl_core.rewards.clipscore import ClipScore, PickScore
from solrl_core.rewards.hpsv2 import HpsV2
from solrl_core.rewards.hpsv3 import HpsV3
from solrl_core.rewards.imagereward import ImageReward
from tests.core.rewards.reward_helpers import AESTHETIC, CLIP, HPSV2, HPSV3, IMAGEREWARD, Tensors, rewritten


def cut(tensors: Tensors, name: str) -> None:
    tensors[name] = tensors[name][:-1].clone()


MISFITS: dict[Any, tuple[str, dict[str, Any], list[tuple[Callable[[Tensors], Any], str]]]] = {
    HpsV2: (
        "an open_clip checkpoint",
        HPSV2,
        [
            (lambda t: t.pop("visual.transformer.resblocks.1.attn.in_proj_bias"), "missing: .*blocks.1.attn.in_proj_b"),
            (lambda t: t.update(strange=torch.zeros(1)), "unexpected: strange"),
            (lambda t: cut(t, "visual.ln_pre.weight"), r"shapes: visual.ln_pre.weight \[15\] \(expected \[16\]\)"),
            (lambda t: t.update({"positional_embedding": torch.zeros(3)}), "expected 2 axes"),
            (lambda t: t.clear(), "no 'visual.conv1.weight' among its 0"),
        ],
    ),
    ImageReward: (
        "ImageReward's own checkpoint",
        IMAGEREWARD,
        [
            (lambda t: t.pop("blip.visual_encoder.norm.bias"), "missing: visual_encoder.norm.bias"),
            (lambda t: t.update({"blip.strange": torch.zeros(1)}), "unexpected: strange"),
            (lambda t: cut(t, "blip.text_encoder.encoder.layer.1.crossattention.self.key.weight"), "shapes: .*cross"),
            (lambda t: [t.pop(name) for name in list(t) if name.startswith("mlp.")], "no tensor named like 'mlp"),
        ],
    ),
    HpsV3: (
        "HPSv3's own checkpoint",
        HPSV3,
        [
            (lambda t: t.pop("rm_head.3.bias"), "missing: rm_head.3.bias"),
            (lambda t: cut(t, "model.layers.1.mlp.up_proj.weight"), "wrong shapes: model.layers.1.mlp.up_proj.weight"),
            (lambda t: t.update(strange=torch.zeros(1)), "unexpected: strange"),
        ],
    ),
}
"""Reward → what it expects, its options, and changes of its checkpoint with what is said of them."""


@pytest.mark.parametrize(
    ("kind", "change", "said"), [(kind, *one) for kind, (_, _, changes) in MISFITS.items() for one in changes]
)
def test_a_misfit_is_refused(tmp_path: Path, kind: Any, change: Callable[[Tensors], Any], said: str) -> None:
    expected, options, _ = MISFITS[kind]
    with pytest.raises(ValueError, match=rf"(?s){said}.*expected {expected}"):
        kind(**rewritten(tmp_path, options, change))


def test_hpsv3_needs_the_tokenizer_of_its_model(tmp_path: Path) -> None:
    small = rewritten(tmp_path, HPSV3, lambda t: cut(t, "model.embed_tokens.weight"))
    with pytest.raises(ValueError, match=r"got a tokenizer of \d+ tokens,? .* pass the model's tokenizer"):
        HpsV3(**small)
    folder = tmp_path / "elsewhere"
    shutil.copytree(HPSV3["processor"], folder)
    assert HpsV3(**{**HPSV3, "processor": str(folder)}).digest == HpsV3(**HPSV3).digest
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": None}))
    with pytest.raises(ValueError, match="has no chat template"):
        HpsV3(**{**HPSV3, "processor": str(folder)})


def test_names_without_blip_are_accepted_unused_projections_ignored_and_safetensors_the_same(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        assert "blip.vision_proj.weight" in tensors
        for name in list(tensors):
            tensors[name.removeprefix("blip.")] = tensors.pop(name)

    assert ImageReward(**rewritten(tmp_path, IMAGEREWARD, change)).digest == ImageReward(**IMAGEREWARD).digest
    tensors = torch.load(HPSV2["checkpoint"], weights_only=True)["state_dict"]
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "hps.safetensors")
    assert HpsV2(**{**HPSV2, "checkpoint": str(tmp_path / "hps.safetensors")}).digest == HpsV2(**HPSV2).digest


class Harmful:
    ran = False

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (setattr, (Harmful, "ran", True))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("text.pt", b"not weights at all", "not a checkpoint of plain tensors"),
        ("empty.pt", b"", "not a checkpoint of plain tensors"),
        ("code.pt", pickle.dumps(Harmful(), protocol=2), "not a checkpoint of plain tensors"),
        ("text.safetensors", b"not weights at all", "not a checkpoint of plain tensors"),
    ],
    ids=["text", "empty", "code", "safetensors"],
)
@pytest.mark.parametrize(("kind", "options"), [(HpsV2, HPSV2), (ImageReward, IMAGEREWARD)])
def test_a_file_that_is_no_checkpoint_is_refused_and_never_run(
    tmp_path: Path, kind: Any, options: dict[str, Any], name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    shutil.copy(Path(IMAGEREWARD["checkpoint"]).parent / "med_config.json", tmp_path)
    with pytest.raises(ValueError, match=said):
        kind(**{**options, "checkpoint": str(tmp_path / name)})
    assert not Harmful.ran


@pytest.mark.parametrize("content", [torch.zeros(3), {"epoch": 3}, {"state_dict": {"a": 1}}, [torch.zeros(3)]])
def test_a_torch_file_without_weights_is_refused(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="expected tensors by name"):
        HpsV2(**{**HPSV2, "checkpoint": str(tmp_path / "other.pt")})


def test_a_missing_file_and_a_folder_of_another_model_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"not a file; expected a \.pt or"):
        HpsV2(**{**HPSV2, "checkpoint": str(tmp_path / "none.pt")})
    with pytest.raises(OSError, match=r"med_config\.json next to the checkpoint"):
        ImageReward(**{**IMAGEREWARD, "med_config": str(tmp_path / "none.json")})
    with pytest.raises(OSError, match="option `processor`"):
        HpsV2(**{**HPSV2, "processor": str(tmp_path)})
    for kind in (ClipScore, PickScore, HpsV2, ImageReward):
        with pytest.raises(OSError, match="none"):
            kind(str(tmp_path / "none"))
    with pytest.raises(ValueError, match="ImageRewardModel"):
        ImageReward(CLIP)


@pytest.mark.parametrize("content", ["[]", "{}", "not json", '{"num_attention_heads": null}'])
def test_an_invalid_med_config_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "med.json").write_text(content)
    with pytest.raises(ValueError, match=r"not BLIP's med_config\.json"):
        ImageReward(**{**IMAGEREWARD, "med_config": str(tmp_path / "med.json")})


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (HpsV2, HPSV2 | {"vision_heads": 3}, "vision_heads 3 for a width of 16"),
        *((HpsV2, HPSV2 | {name: 0}, f"{name} 0") for name in ("text_heads", "batch_size")),
        (HpsV2, HPSV2 | {"dtype": "int8"}, "expected one of .*bfloat16"),
        (HpsV2, HPSV2 | {"model": CLIP}, "expected one of them"),
        (HpsV2, HPSV2 | {"processor": CLIP}, "option `processor`"),
        (ImageReward, {**IMAGEREWARD, "vision_heads": 5}, "vision_heads 5 for a width of 16"),
        (ClipScore, {"model": CLIP, "dtype": "half"}, "got dtype 'half'"),
        (Aesthetic, {**AESTHETIC, "batch_size": 0}, "batch_size 0"),
        (Aesthetic, {**AESTHETIC, "dtype": "int8"}, "got dtype 'int8'"),
    ],
)
def test_an_invalid_option_is_refused(kind: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        kind(**options)


@pytest.mark.parametrize("kind", [ClipScore, PickScore, HpsV2])
@pytest.mark.parametrize("damage", ["lost", "reshaped"])
def test_a_clip_folder_without_all_its_weights_is_refused(tmp_path: Path, kind: Any, damage: str) -> None:
    folder = tmp_path / "clip"
    shutil.copytree(CLIP, folder)
    tensors = load_file(folder / "model.safetensors")
    name = "vision_model.post_layernorm.weight"
    weight = tensors.pop(name)
    if damage == "reshaped":
        tensors[name] = weight[:-1].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks weights of CLIPModel: .*post_layernorm|does not fit its own config"):
        kind(str(folder))


def test_a_checkpoint_of_true_sizes_needs_no_option(tmp_path: Path) -> None:
    """Sizes come from shapes: other depths and widths than the reference's convert too."""
    tensors = torch.load(HPSV2["checkpoint"], weights_only=True)["state_dict"]
    for name in [name for name in tensors if "visual.transformer.resblocks.1." in name]:
        tensors[name.replace(".1.", ".2.")] = tensors[name]
    torch.save(tensors, tmp_path / "deeper.pt")
    deeper = HpsV2(**{**HPSV2, "checkpoint": str(tmp_path / "deeper.pt")})
    assert deeper._model.config.vision_config.num_hidden_layers == 3
    assert json.loads(deeper._model.config.to_json_string())["vision_config"]["image_size"] == 48


def test_the_end_of_a_prompt_that_imagereward_does_not_read_is_counted() -> None:
    reward = ImageReward(**IMAGEREWARD)
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    for text, unread in (("b", False), ("b" * 34, True)):
        longer = reward.unread_tokens(text + "a")
        assert (reward.unread_tokens(text), longer > 0) == (int(unread), unread)
        scores = [reward(images, [text + end] * 2, [{}] * 2) for end in "ac"]
        assert torch.equal(*scores) == unread
