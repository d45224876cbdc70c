"""LoRA on every family, compared with PEFT and with each family's diffusers pipeline."""

import copy
import re
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from diffusers import DiffusionPipeline
from peft import PeftModel
from solrl_core.adapter import Adapter, decode_adapter, encode_adapter, encode_for_diffusers
from solrl_core.lora import adapter_layout
from solrl_core.sampling.generator import Generator
from solrl_core.sampling.noise import initial_noise
from tests.core.families.tiny_models import ONE_EACH, Tiny, by_diffusers
from tests.core.families.tiny_pipelines import PROMPTS, difference, on_a_grid
from tests.core.lora_helpers import random_adapter, with_peft

pytestmark = pytest.mark.parametrize("tiny", ONE_EACH, indirect=True)


@torch.no_grad()
def test_a_merged_adapter_equals_pefts_unmerged_forward(tiny: Tiny) -> None:
    mine, adapter = on_a_grid(tiny.backbone)
    generator = Generator(mine, "bf16")
    generator.set_adapter(adapter)
    x, at, rows = initial_noise([3, 14], mine.latent_shape), torch.tensor([1.0, 0.3]), mine.encode(PROMPTS, 2.0)
    for guidance in (1.0, 2.0):
        ours = mine.velocity(generator.transformer, x, at, rows, guidance)
        theirs = mine.velocity(with_peft(mine, adapter), x, at, rows, guidance)
        base = mine.velocity(mine.transformer, x, at, rows, guidance)
        assert ours.dtype == torch.float32
        assert difference(ours, theirs) <= 1e-5 * max(1.0, float(theirs.abs().max()))
        assert difference(ours, base) > 0.01


def test_gradients_reach_every_factor(tiny: Tiny) -> None:
    model = tiny.backbone
    transformer = with_peft(model, random_adapter(model, 0))
    x, rows = initial_noise([3], model.latent_shape), model.encode(PROMPTS[:1])
    model.velocity(transformer, x, torch.tensor([0.5]), rows).square().mean().backward()  # type: ignore[no-untyped-call]
    factors = {name: p for name, p in transformer.named_parameters() if p.requires_grad}
    assert len(factors) == 2 * len(adapter_layout(model.transformer, model.lora_targets))
    # The last block discards its text output, so its text queries, and all layers after them, change nothing.
    idle = {
        "sd3": ("blocks.1.attn.add_q_proj",),
        "qwen-image": ("blocks.1.attn.add_q_proj", "blocks.1.attn.to_add_out", "blocks.1.txt_mlp"),
    }.get(model.family, ())
    for name, factor in factors.items():
        moved = factor.grad is not None and bool(factor.grad.any())
        assert moved != any(part in name for part in idle), name
        layer = name.removeprefix("base_model.model.").partition(".lora_")[0]
        assert factor.grad is not None or re.fullmatch(model.unused_lora_layers or "", layer), name


def test_the_adapter_file_holds_what_peft_saves_and_loads(tiny: Tiny, tmp_path: Path) -> None:
    model, adapter = tiny.backbone, random_adapter(tiny.backbone, 0)
    transformer = with_peft(model, adapter)
    transformer.save_pretrained(str(tmp_path))
    saved = safetensors.torch.load_file(tmp_path / "adapter_model.safetensors")
    layout = adapter_layout(model.transformer, model.lora_targets)
    read = decode_adapter(encode_adapter(Adapter(adapter.rank, adapter.alpha, saved)), layout)
    assert (read.rank, read.alpha) == (adapter.rank, adapter.alpha)
    assert read.tensors.keys() == adapter.tensors.keys()
    assert all(torch.equal(tensor, adapter.tensors[key]) for key, tensor in read.tensors.items())

    other = random_adapter(model, 1)
    (tmp_path / "adapter_model.safetensors").write_bytes(encode_adapter(other))
    loaded = PeftModel.from_pretrained(copy.deepcopy(model.transformer), str(tmp_path)).state_dict()
    for key, tensor in other.tensors.items():
        head, _, tail = key.rpartition(".")
        assert torch.equal(loaded[f"{head}.default.{tail}"], tensor)


def test_the_exported_file_gives_the_same_image_in_diffusers(tiny: Tiny, tmp_path: Path) -> None:
    mine, adapter = on_a_grid(tiny.backbone)
    generator = Generator(mine, "bf16")
    base = generator.generate(PROMPTS[0], [3], steps=3).images
    generator.set_adapter(adapter)
    ours = generator.generate(PROMPTS[0], [3], steps=3).images

    pipeline = DiffusionPipeline.from_pretrained(tiny.folder, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.transformer.load_state_dict(mine.transformer.state_dict())
    (tmp_path / "lora.safetensors").write_bytes(encode_for_diffusers(adapter))
    pipeline.load_lora_weights(str(tmp_path), weight_name="lora.safetensors")
    theirs = by_diffusers(replace(tiny, pipeline=pipeline), PROMPTS[:1], [3], 3)
    assert difference(ours, theirs) <= 1e-5
    assert difference(ours, base) > 0.01
