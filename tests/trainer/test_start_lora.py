"""Runs that start from an existing LoRA: the files of other trainers make the change that their trainers mean."""

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load, load_file, save_file
from solrl_core.adapter import Adapter, encode_adapter, encode_for_diffusers, lora_a_key, lora_b_key
from solrl_core.families import load_backbone
from solrl_core.families.original_layers import encode_in_layout
from solrl_core.families.pipeline import PipelineBackbone
from solrl_trainer.__main__ import main
from solrl_trainer.commands.run import run
from solrl_trainer.policy.policy import CURRENT, OLD, Policy
from solrl_trainer.policy.start_lora import read_start
from solrl_trainer.settings.presets import resolve
from solrl_trainer.settings.training_sections import Lora
from tests.core.lora_helpers import own_copy, random_adapter
from tests.support.typed import typed
from tests.trainer.training_helpers import QUICK

TARGET = "transformer_blocks.0.attn.to_out.0"
KEY = f"transformer.{TARGET}"
NO_ALPHA = "taken to be the rank, as ComfyUI and diffusers do without one"
QKV = "lora_unet_double_blocks_0_img_attn_qkv"


@pytest.fixture(scope="module")
def flux() -> PipelineBackbone:
    return load_backbone("mini-flux")


@pytest.fixture
def policy(flux: PipelineBackbone) -> Policy:
    """A policy of rank 4 and scale 0.5."""
    mine = own_copy(flux)
    return Policy(mine, Lora(rank=4, alpha=2), seed=1)


def started(policy: Policy, flux: PipelineBackbone, path: Path) -> Adapter:
    policy.start_from(read_start(path, flux, policy.behaviour()).weights)
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


def test_diffusers_alpha_counts_and_other_layers_stay(policy: Policy, flux: PipelineBackbone, tmp_path: Path) -> None:
    adapter = random_adapter(flux, 3, 1.0, 3, 3.0)
    a, b = adapter.tensors[lora_a_key(TARGET)], adapter.tensors[lora_b_key(TARGET)]
    file = {
        f"{KEY}.lora_A.weight": a.bfloat16(),
        f"{KEY}.lora_B.weight": b.bfloat16(),
        f"{KEY}.alpha": torch.tensor(1.5),
    }
    save_file(file, tmp_path / "one.safetensors")
    before = policy.behaviour()
    found = started(policy, flux, tmp_path / "one.safetensors")
    torch.testing.assert_close(found.delta(TARGET), 0.5 * b.bfloat16().float() @ a.bfloat16().float())
    others = [key for key in before.tensors if TARGET not in key]
    assert others
    assert all(torch.equal(found.tensors[key], before.tensors[key]) for key in others)


def peft_folder(flux: PipelineBackbone, folder: Path, **settings: Any) -> Any:
    """Save an adapter of to_q and to_k by PEFT, and return its model."""
    torch.manual_seed(0)
    config = LoraConfig(
        target_modules=["to_q", "to_k"], **{"r": 2, "lora_alpha": 3, "init_lora_weights": False} | settings
    )
    model = get_peft_model(copy.deepcopy(flux.transformer), config)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True},
        {"alpha_pattern": {r"single_transformer_blocks\.\d+\.attn\.to_q": 7}},
        {"rank_pattern": {r".*\.0\.attn\.to_q": 4, "to_k": 1}, "alpha_pattern": {"attn.to_k": 5.5}, "use_rslora": True},
    ],
    ids=["plain", "rslora", "alpha", "both"],
)
def test_a_folder_of_peft(policy: Policy, flux: PipelineBackbone, tmp_path: Path, settings: dict[str, Any]) -> None:
    model = peft_folder(flux, tmp_path, **settings)
    found = started(policy, flux, tmp_path)
    layers = [(name, layer) for name, layer in model.base_model.model.named_modules() if hasattr(layer, "lora_A")]
    assert len(layers) >= 4
    for name, layer in layers:
        expected = layer.get_delta_weight("default")
        torch.testing.assert_close(found.delta(name), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        *(
            ({"init_lora_weights": name}, f"has init_lora_weights='{name}' of adapter_config.json beside it, which may")
            for name in ("pissa", "pissa_niter_4", "olora", "eva", "corda", "loftq", "lora_ga")
        ),
        ({"use_dora": True}, "has use_dora=True of adapter_config.json beside it; expected a plain LoRA"),
        ({"kasa_config": {"beta": 1}}, "has kasa_config={'beta': 1} of"),
        ({"of_a_later_peft": 1}, "has of_a_later_peft=1 of"),
        ({"peft_type": "LOHA"}, "is a LOHA by peft_type of"),
        ({"r": 3}, r"has rank 2 at .*\.to_[qk], but 3 of adapter_config\.json beside it: one is of another file"),
        ({"lora_alpha": "many"}, "has settings of adapter_config.json beside it that PEFT does not take: could not"),
        ({"alpha_pattern": {"(": 1}}, r"has the pattern \{'\(': 1\} of .*, which PEFT cannot apply"),
        ({"alpha_pattern": [1]}, r"has the pattern \[1\] of .*, which PEFT cannot apply"),
        ({"lora_alpha": float("inf")}, r"has alpha inf for .*\.to_[qk] of .*; expected a finite number"),
    ],
)
def test_settings_of_peft_that_are_not_understood_are_named(
    policy: Policy, flux: PipelineBackbone, tmp_path: Path, change: dict[str, Any], error: str
) -> None:
    peft_folder(flux, tmp_path)
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(ValueError, match=error):
        started(policy, flux, tmp_path)


def test_comfyui_s_layout_may_name_its_factors_a_and_b(policy: Policy, flux: PipelineBackbone, tmp_path: Path) -> None:
    adapter = random_adapter(flux, 3, 1.0, 4, 2.0)
    file = load(encode_in_layout(adapter, "flux", "comfyui"))
    file = {key.replace("lora_down", "lora_A").replace("lora_up", "lora_B"): tensor for key, tensor in file.items()}
    save_file(file, tmp_path / "l.safetensors", {"lora_alpha": "2"})
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
        (dict(list(pair().items())[:1]), r"has only lora_A of .*to_out\.0; expected both"),
        ({}, "has no tensors; expected lora_A and lora_B"),
        ({"text_encoder.q.weight": torch.ones(1)}, r"has text_encoder\.q\.weight; expected lora_A, lora_B and alpha"),
        (pair() | {f"{KEY}.dora_scale": torch.ones(8, 1)}, r"has .*\.dora_scale; expected lora_A, lora_B and alpha"),
        (pair() | {f"{KEY}.lora_B.bias": torch.ones(8)}, r"has .*\.lora_B\.bias; expected lora_A, lora_B and alpha"),
        (
            pair() | {f"{KEY}.lora_A.weight": torch.full((1, 8), torch.nan)},
            r"values in .*lora_A\.weight that are not fin",
        ),
        (pair() | {f"{KEY}.alpha": torch.tensor(torch.inf)}, r"values in .*\.alpha that are not finite"),
        (pair() | {f"{KEY}.alpha": torch.ones(2)}, r"has .*\.alpha of shape \[2\]; expected one number"),
        (
            pair(128, 128) | {f"{KEY}.lora_B.weight": torch.zeros(128, 1)},
            "changes none of its 1 modules: B or alpha is zero",
        ),
        (pair(rank=0), r"lora_A\.weight \[0, 8\]; expected .* of rank 1 or more"),
        (pair() | {f"{KEY}.lora_A.weight": torch.ones(8)}, r"lora_A\.weight \[8\]; expected .* of rank 1 or more"),
        (
            pair() | {f"base_model.model.{TARGET}.lora_A.weight": torch.ones(1, 8)},
            rf"has both .*{TARGET}\.lora_A\.weight and .*{TARGET}\.lora_A\.weight, of one layer; expected one",
        ),
        (
            pair(module="transformer_blocks.0.attn.to_q")
            | {f"{QKV}.lora_down.weight": torch.ones(1, 8), f"{QKV}.lora_up.weight": torch.ones(24, 1)},
            r"has a second layer of transformer_blocks\.0\.attn\.to_q, .*; expected one",
        ),
    ],
)
def test_a_file_that_does_not_fit_is_named(
    policy: Policy, flux: PipelineBackbone, tmp_path: Path, tensors: dict[str, torch.Tensor], error: str
) -> None:
    save_file(tensors, tmp_path / "l.safetensors")
    with pytest.raises(ValueError, match=error):
        started(policy, flux, tmp_path / "l.safetensors")


@pytest.mark.parametrize(
    ("metadata", "scale", "alpha"),
    [
        ({}, 1, NO_ALPHA),
        ({"ss_network_alpha": "8"}, 1, f"{NO_ALPHA} (ss_network_alpha=8 of its header is not used)"),
        ({"lora_alpha": "6"}, 3, "of lora_alpha in its header"),
        (
            {"lora_adapter_metadata": json.dumps({"transformer.lora_alpha": 6, "transformer.use_rslora": True})},
            6 / 2**0.5,
            "of lora_adapter_metadata in its header",
        ),
    ],
)
def test_one_line_says_what_was_read_and_by_which_alpha(
    policy: Policy, flux: PipelineBackbone, tmp_path: Path, metadata: dict[str, str], scale: float, alpha: str
) -> None:
    file = tmp_path / "l.safetensors"
    zero = pair(128, 128, module="transformer_blocks.0.attn.to_q")
    save_file(pair(128, 128, rank=2) | {name: value * 0 for name, value in zero.items()}, file, metadata)
    initial = policy.behaviour()
    weights, said = read_start(file, flux, initial)
    total = len(initial.modules)
    counts = f"1 of {total} layers read, {total - 2} left as they are, 1 unchanged by zeros in it"
    assert said == f"starting from {file}: {counts}; alpha {alpha}"
    torch.testing.assert_close(Adapter(4, 2.0, weights).delta(TARGET), torch.full((128, 128), 2.0 * scale))


def test_what_is_no_lora_is_named(policy: Policy, flux: PipelineBackbone, tmp_path: Path) -> None:
    for metadata in ("{", "[1]"):
        save_file(pair(), tmp_path / "l.safetensors", {"lora_adapter_metadata": metadata})
        with pytest.raises(ValueError, match=r"l\.safetensors .*of lora_adapter_metadata in its header"):
            started(policy, flux, tmp_path / "l.safetensors")
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
    assert "starting from" in (tmp_path / "run" / "trainer.log").read_text()
    asked = ("export", str(tmp_path / "run"), "--output", str(tmp_path / "out"), "--format", "kohya")
    done = typed(main, *asked)
    assert f"names of kohya: {tmp_path / 'out' / 'lora-kohya.safetensors'}" in done.stdout, done.stderr
    file = load_file(tmp_path / "out" / "lora-kohya.safetensors")
    own = "lora_unet_double_blocks_0_img_attn_proj"
    change = file[f"{own}.alpha"] / 2 * file[f"{own}.lora_up.weight"] @ file[f"{own}.lora_down.weight"]
    torch.testing.assert_close(change, small.delta(TARGET), rtol=1e-4, atol=1e-7)
    found = load_file(tmp_path / "run" / "lora.safetensors")
    a, b = found[f"{KEY}.lora_A.weight"], found[f"{KEY}.lora_B.weight"]
    torch.testing.assert_close(b @ a, small.delta(TARGET), rtol=1e-4, atol=1e-7)
