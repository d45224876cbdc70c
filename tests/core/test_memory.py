"""Memory plans: count tensors while they are alive and weights once, and need no weight file."""

import shutil
from pathlib import Path

import pytest
import torch
from solrl_core.families import load_backbone
from solrl_core.families.skeleton import load_skeleton
from solrl_core.memory_plan import PeakBytes, plan_memory, weight_bytes
from solrl_core.sampling.generator import Generator
from tests.support.small_model import small_model

MIB = 2**20


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model without a single weight."""
    folder = tmp_path_factory.mktemp("bare") / "mini-sana"
    shutil.copytree(small_model(), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def test_the_peak_counts_tensors_alive_at_the_same_time_but_none_of_before() -> None:
    with PeakBytes() as counted:
        x = torch.empty(MIB, dtype=torch.uint8, device="meta")
        y = torch.empty(2 * MIB, dtype=torch.uint8, device="meta")
        del x
        z = torch.empty(MIB, dtype=torch.uint8, device="meta")
        view = z[10:]
        view.add_(1)
        del y, z, view
    assert counted.peak == 3 * MIB
    x = torch.empty(4 * MIB, dtype=torch.uint8, device="meta")
    with PeakBytes() as counted:
        x.add_(1)
        x.view(2, -1)
        assert counted.peak == 0
        x + 1
    assert counted.peak == 4 * MIB


@pytest.mark.parametrize("precision", ["bf16", "nvfp4"])
def test_weights_are_counted_once_and_need_no_file(bare: Path, precision: str) -> None:
    plan = plan_memory(load_skeleton(str(bare)), [precision], 4)
    real = load_backbone(small_model())
    for part in ("transformer", "vae", "text_encoder"):
        values = sum(p.numel() for p in real.parts[part].parameters())
        # In bfloat16; each tensor is rounded up to the allocator's granule.
        assert 2 * values <= plan.weights[part] <= 2 * values + 512 * len(list(real.parts[part].parameters()))
    # The BF16 generator has its own copy of the layers that LoRA binds; the emulation holds all in float32.
    if precision == "bf16":
        assert 0 < plan.weights[f"served, {precision}"] < plan.weights["transformer"]
    else:
        assert plan.weights[f"served, {precision}"] > plan.weights["transformer"]


def test_weights_are_quantised_without_a_copy_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = load_skeleton("mini-sana")
    monkeypatch.setattr(backbone, "lora_targets", r"transformer_blocks\..*")
    with PeakBytes() as built:
        generator = Generator(backbone, "fp8")
    kept = weight_bytes({"base": backbone.transformer, "served": generator.transformer})["served"]
    assert built.peak < 1.2 * kept


def test_a_batch_within_the_limit_fits_and_one_more_does_not(bare: Path) -> None:
    backbone = load_skeleton(str(bare))
    plan = plan_memory(backbone, ["bf16"], 12)
    limit = plan.total + 10 * MIB
    most = plan.largest_batch(limit)
    assert most > 12
    assert plan_memory(backbone, ["bf16"], most).total <= limit * 1.01
    assert plan_memory(backbone, ["bf16"], most + 2).total > limit * 0.99
    assert plan.largest_batch(sum(plan.weights.values()) + plan.prompts - 1) == 0


def test_fp8_is_planned_without_units_and_small_batches_decode_in_less_memory(bare: Path) -> None:
    backbone = load_skeleton(str(bare))
    layers = [backbone.transformer.get_submodule(name) for name in backbone.fp8_policy.select(backbone.transformer)]
    codes = sum(layer.get_parameter("weight").numel() for layer in layers)
    # A byte a weight, and a scale and a bias a row.
    assert codes < plan_memory(backbone, ["fp8"], 12).weights["served, fp8"] < 1.2 * codes
    one, dozen = (plan_memory(load_skeleton(str(bare)), ["bf16"], batch).activations["decode"] for batch in (1, 24))
    assert one < dozen / 6


def test_activations_equal_those_of_a_real_pass(bare: Path) -> None:
    """On the CPU the same operations really run, in float32."""
    real, bones = load_backbone(small_model()), load_skeleton(str(bare))
    bones.parts["vae"].float()
    peaks = []
    for backbone in (real, bones):
        latents = torch.zeros(6, *real.latent_shape, device=backbone.device)
        with torch.inference_mode(), PeakBytes() as counted:
            backbone.decode(latents)
        peaks.append(counted.peak)
    assert peaks[0] == peaks[1] > MIB
