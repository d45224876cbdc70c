"""Runs that start from an existing LoRA: the files of other trainers make the change that their trainers mean."""

import copy
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from lora_helpers import own_copy, random_adapter
from peft import LoraConfig, get_peft_model
from safetensors.torch import load, load_file, save_file
from solrl_core.adapter import Adapter, encode_adapter, encode_for_diffusers, lora_a_key, lora_b_key
from solrl_core.families import load_backbone
from solrl_core.families.original_layers import encode_in_layout
from solrl_core.families.pipeline import PipelineBackbone
from solrl_trainer.commands.cli import main
from solrl_trainer.commands.run import run
from solrl_trainer.policy.policy import CURRENT, OLD, Policy
from solrl_trainer.policy.start_lora import read_start
from solrl_trainer.settings.config import Lora
from solrl_trainer.settings.presets import resolve
from training_helpers import QUICK
from typed import typed

TARGET = "transformer_blocks.0.attn.to_out.0"
QKV = "lora_unet_double_blocks_0_img_attn_qkv"


@pytest.fixture(scope="module")
def flux() -> PipelineBackbone:
    return load_backbone("mini-flux")


@pytest.fixture
def policy(flux: PipelineBackbone) -> Policy:
    """Of rank 4 and scale 0.5."""
    mine = own_copy(flux)
    return Policy(mine, Lora(rank=4, alpha=2), seed=1)


def started(policy: Policy, flux: PipelineBackbone, path: Path) -> Adapter:
    policy.start_from(read_start(path, flux, policy.behaviour()))
    for name in (CURRENT, OLD):
        assert all(torch.equal(value, policy.averaged[key]) for key, value in policy.tensors(name).items())
    return policy.behaviour()


def assert_same_changes(found: Adapter, expected: Adapter) -> None:
    for module in expected.modules:
        torch.testing.assert_close(found.delta(module), expected.delta(module), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rank", "alpha"), [(4, 2.0), (3, 5.0), (1, 1.0)])
@pytest.mark.parametrize(
    "encode",
    [
        encode_adapter,
        encode_for_diffusers,
        partial(encode_in_layout, family="flux", layout="comfyui"),
        partial(encode_in_layout, family="flux", layout="kohya"),
    ],
)
def test_own_files_start_a_run(
    policy: Policy, flux: PipelineBackbone, tmp_path: Path, rank: int, alpha: float, encode: object
) -> None:
    adapter = random_adapter(flux, 3, 1.0, rank, alpha)
    (tmp_path / "lora.safetensors").write_bytes(encode(adapter))  # type: ignore[operator]
    assert_same_changes(started(policy, flux, tmp_path), adapter)


def test_diffusers_alphas_and_metadata_count(policy: Policy, flux: PipelineBackbone, tmp_path: Path) -> None:
    adapter = random_adapter(flux, 3, 1.0, 2, 6.0)
    file = {name.replace("base_model.model.", "transformer."): value for name, value in adapter.tensors.items()}
    save_file(file, tmp_path / "l.safetensors", {"lora_adapter_metadata": json.dumps({"transformer.lora_alpha": 6})})
    assert_same_changes(started(policy, flux, tmp_path / "l.safetensors"), adapter)
    adapter = random_adapter(flux, 3, 1.0, 3, 3.0)
    a, b = adapter.tensors[lora_a_key(TARGET)], adapter.tensors[lora_b_key(TARGET)]
    key = f"transformer.{TARGET}"
    file = {
        f"{key}.lora_A.weight": a.bfloat16(),
        f"{key}.lora_B.weight": b.bfloat16(),
        f"{key}.alpha": torch.tensor(1.5),
    }
    save_file(file, tmp_path / "one.safetensors")
    before = policy.behaviour()
    found = started(policy, flux, tmp_path / "one.safetensors")
    torch.testing.assert_close(found.delta(TARGET), 0.5 * b.bfloat16().float() @ a.bfloat16().float())
    others = [key for key in before.tensors if TARGET not in key]
    assert others
    assert all(torch.equal(found.tensors[key], before.tensors[key]) for key in others)


def test_a_folder_of_peft(policy: Policy, flux: PipelineBackbone, tmp_path: Path) -> None:
    torch.manual_seed(0)
    settings = LoraConfig(r=2, lora_alpha=3, target_modules=["to_q", "to_k"], init_lora_weights=False)
    model = get_peft_model(copy.deepcopy(flux.transformer), settings)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    found = started(policy, flux, tmp_path)
    for name in (key for key in saved if "lora_A" in key):
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        expected = 1.5 * saved[lora_b_key(module)] @ saved[lora_a_key(module)]
        torch.testing.assert_close(found.delta(module), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("named", [("down", "up"), ("A", "B")])
@pytest.mark.parametrize("metadata", [None, {"lora_alpha": "2"}])
def test_the_layout_of_comfyui(
    policy: Policy, flux: PipelineBackbone, tmp_path: Path, named: tuple[str, str], metadata: dict[str, str] | None
) -> None:
    adapter = random_adapter(flux, 3, 1.0, 4, 2.0)
    file = {
        key.replace("lora_down", f"lora_{named[0]}").replace("lora_up", f"lora_{named[1]}"): tensor
        for key, tensor in load(encode_in_layout(adapter, "flux", "comfyui")).items()
    }
    save_file(file, tmp_path / "l.safetensors", metadata)
    assert_same_changes(started(policy, flux, tmp_path / "l.safetensors"), adapter)


def pair(rows: int = 8, columns: int = 8, rank: int = 1, module: str = TARGET) -> dict[str, torch.Tensor]:
    name = f"transformer.{module}"
    return {f"{name}.lora_A.weight": torch.ones(rank, columns), f"{name}.lora_B.weight": torch.ones(rows, rank)}


@pytest.mark.parametrize(
    ("tensors", "error"),
    [
        (pair(rank=5), r"has rank 5 at .*; expected --set lora\.rank=5 or more"),
        (pair(rows=7), r"has \(7, 1\) · \(1, 8\) at .*: a LoRA of another model"),
        (pair(module="norm_out.linear"), r"adapts 1 modules that this run .*, such as norm_out\.linear; expected"),
        (dict(list(pair().items())[:1]), r"has one of lora_A and lora_B of .*; expected both"),
        (
            {f"{QKV}.lora_down.weight": torch.ones(1, 8), f"{QKV}.lora_up.weight": torch.ones(2, 1)},
            rf"l\.safetensors: {QKV}\.lora_up\.weight has 2 rows; expected a multiple of 3",
        ),
        ({}, "has no tensors; expected lora_A and lora_B"),
        ({"text_encoder.q.weight": torch.ones(1)}, r"has text_encoder\.q\.weight; expected lora_A, lora_B and alpha"),
    ],
)
def test_a_file_that_does_not_fit_is_named(
    policy: Policy, flux: PipelineBackbone, tmp_path: Path, tensors: dict[str, torch.Tensor], error: str
) -> None:
    save_file(tensors, tmp_path / "l.safetensors")
    with pytest.raises(ValueError, match=error):
        started(policy, flux, tmp_path / "l.safetensors")


def test_what_is_no_lora_is_named(policy: Policy, flux: PipelineBackbone, tmp_path: Path) -> None:
    (tmp_path / "l.safetensors").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"l\.safetensors is no safetensors file"):
        started(policy, flux, tmp_path / "l.safetensors")
    with pytest.raises(ValueError, match=r"expected a file, or a folder with adapter_model\.safetensors or"):
        started(policy, flux, tmp_path / "none")


def test_a_run_trains_on_from_its_start(flux: PipelineBackbone, tmp_path: Path) -> None:
    adapter = random_adapter(flux, 3, 1.0, 2, 2.0)
    small = Adapter(2, 2.0, {key: 0.01 * tensor for key, tensor in adapter.tensors.items()})
    (tmp_path / "l.safetensors").write_bytes(encode_for_diffusers(small))
    words = [*QUICK, "explore.prompts=1", "optimizer.learning_rate=1e-12", "optimizer.weight_decay=0"]
    words += [f"start_lora={tmp_path / 'l.safetensors'}", f"output={tmp_path / 'run'}"]
    run(resolve("mini-flux/sol_rl/clipscore", overrides=words).config)
    asked = ("export", str(tmp_path / "run"), "--output", str(tmp_path / "out"), "--format", "kohya")
    done = typed(main, *asked)
    assert f"names of kohya: {tmp_path / 'out' / 'lora-kohya.safetensors'}" in done.stdout, done.stderr
    file = load_file(tmp_path / "out" / "lora-kohya.safetensors")
    own = "lora_unet_double_blocks_0_img_attn_proj"
    change = file[f"{own}.alpha"] / 2 * file[f"{own}.lora_up.weight"] @ file[f"{own}.lora_down.weight"]
    torch.testing.assert_close(change, small.delta(TARGET), rtol=1e-4, atol=1e-7)

    found = load_file(tmp_path / "run" / "lora.safetensors")
    a, b = found[f"transformer.{TARGET}.lora_A.weight"], found[f"transformer.{TARGET}.lora_B.weight"]
    torch.testing.assert_close(b @ a, small.delta(TARGET), rtol=1e-4, atol=1e-7)
