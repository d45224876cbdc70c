"""Digests: equal for equal models, whatever their dtype, device or memory layout, and different for any other."""

import copy
import importlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SanaPipeline, SanaTransformer2DModel
from solrl_core import fingerprint
from solrl_core.errors import MismatchError
from solrl_core.families import Backbone, load_backbone
from solrl_core.families.load import locate
from solrl_core.fingerprint import (
    SCHEDULE,
    check_digests,
    model_digest,
    module_digest,
    part_digests,
    schedule_digest,
    source_digest,
)
from torch import nn
from transformers import AutoTokenizer

PARTS = {"transformer", "text_encoder", "tokenizer", "vae", "scheduler"}


@pytest.fixture(scope="module")
def digests(backbone: Backbone) -> dict[str, str]:
    return part_digests(backbone.parts)


def test_every_part_has_a_digest_of_its_own(backbone: Backbone, digests: dict[str, str]) -> None:
    assert digests.keys() == PARTS
    assert len(set(digests.values())) == len(PARTS)
    for digest in digests.values():
        assert digest.startswith("sha256:")
        assert len(digest) == len("sha256:") + 64
    # Earlier use changes none.
    backbone.encode(["a red circle", "two blue squares"], 2.0)
    backbone.decode(torch.zeros(1, *backbone.latent_shape))
    assert part_digests(backbone.parts) == digests


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_digests_do_not_depend_on_dtype_or_place(digests: dict[str, str], dtype: torch.dtype, tmp_path: Path) -> None:
    folder = shutil.copytree(locate("mini-sana"), tmp_path / "elsewhere")
    pipeline = SanaPipeline.from_pretrained(folder, dtype=dtype)
    parts = {name: getattr(pipeline, name) for name in PARTS}
    assert parts["transformer"].dtype == dtype
    assert part_digests(parts) == digests


@pytest.mark.parametrize("part", ["transformer", "text_encoder", "vae"])
def test_one_changed_weight_changes_the_digest(backbone: Backbone, digests: dict[str, str], part: str) -> None:
    module = copy.deepcopy(backbone.parts[part])
    assert module_digest(module) == digests[part]
    with torch.no_grad():
        weight = list(module.parameters())[-1].view(-1)
        weight[-1] = weight[-1] * 1.01 + 0.01
    assert module_digest(module) != digests[part]


@pytest.mark.parametrize(
    "others",
    [
        ({"a": torch.zeros(2, 3)}, {"a": torch.zeros(3, 2)}),
        ({"a": torch.zeros(2), "b": torch.ones(2)}, {"a": torch.ones(2), "b": torch.zeros(2)}),
        ({"scale": torch.tensor(1.0)}, {"scale": torch.tensor(2.0)}),
    ],
    ids=["shape", "name", "value of a scalar"],
)
@pytest.mark.parametrize("buffers", [False, True])
def test_names_shapes_and_values_count(others: tuple[dict[str, torch.Tensor], ...], buffers: bool) -> None:
    def digest(tensors: dict[str, torch.Tensor]) -> str:
        module = nn.Module()
        for name, tensor in tensors.items():
            if buffers:
                module.register_buffer(name, tensor)
            else:
                module.register_parameter(name, nn.Parameter(tensor))
        return module_digest(module)

    one, other = others
    assert digest(one) == digest(one) != digest(other)


def test_the_place_of_a_value_counts_but_not_where_channels_are_in_memory() -> None:
    """A 1×1 convolution with its channels last counts as contiguous, though its last stride is not 1."""
    for kernel in (1, 3):
        convolution = nn.Conv2d(4, 6, kernel, dtype=torch.bfloat16)
        before = module_digest(convolution)
        convolution.to(memory_format=torch.channels_last)
        assert module_digest(convolution) == before
    # More values than are summed at once; each is found where it is.
    values = torch.zeros(2**24 + 5, dtype=torch.bfloat16)
    seen = set()
    for place in (None, 0, 1, 4095, 4096, 2**23, 2**24, 2**24 + 4):
        changed = values.clone()
        if place is not None:
            changed[place] = 1
        seen.add(module_digest(nn.ParameterDict({"a": changed})))
    assert len(seen) == 8
    swapped = torch.arange(2**14, dtype=torch.float32).view(2, -1)
    one, other = (module_digest(nn.ParameterDict({"a": each})) for each in (swapped, swapped.flip(0)))
    assert one != other


@pytest.mark.gpu
def test_a_gpu_computes_the_same_digest_as_a_cpu() -> None:
    linear = nn.Linear(3000, 3000)
    assert module_digest(copy.deepcopy(linear).cuda()) == module_digest(linear)


def test_a_changed_configuration_counts_but_no_schedule_for_a_fit(backbone: Backbone, digests: dict[str, str]) -> None:
    transformer: SanaTransformer2DModel = copy.deepcopy(backbone.parts["transformer"])
    transformer.register_to_config(timestep_scale=2.0)
    assert module_digest(transformer) != digests["transformer"]
    shifted = FlowMatchEulerDiscreteScheduler.from_config(backbone.parts["scheduler"].config, shift=3.0)
    assert part_digests({"scheduler": shifted})["scheduler"] != digests["scheduler"]
    assert model_digest(digests | {SCHEDULE: "sha256:0", "reward:a": "sha256:1"}) == model_digest(digests)
    assert fingerprint.fingerprint(digests | {SCHEDULE: "sha256:0"}, ()) != fingerprint.fingerprint(digests, ())


@pytest.mark.parametrize("model", ["mini-sd3", "mini-flux"])
def test_other_noise_levels_of_one_configuration_are_noticed(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a service would compute them whose diffusers shifts differently."""
    backbone = load_backbone(model)
    ours = {"scheduler": part_digests(backbone.parts)["scheduler"], SCHEDULE: schedule_digest(backbone.sigmas)}
    compute = FlowMatchEulerDiscreteScheduler.set_timesteps

    def moved(factor: float) -> dict[str, str]:
        def set_timesteps(self: FlowMatchEulerDiscreteScheduler, *args: Any, **kwargs: Any) -> None:
            compute(self, *args, **kwargs)
            self.sigmas = self.sigmas * factor

        monkeypatch.setattr(FlowMatchEulerDiscreteScheduler, "set_timesteps", set_timesteps)
        return ours | {SCHEDULE: schedule_digest(backbone.sigmas)}

    check_digests(moved(1 + 1e-7), ours)
    with pytest.raises(MismatchError, match="the service's schedule is not the trainer's") as raised:
        check_digests(moved(0.999), ours)
    assert (raised.value.where, raised.value.expected) == (SCHEDULE, ours[SCHEDULE])
    assert "same version of diffusers" in str(raised.value.action)


def edited(tmp_path: Path, edit: Callable[[dict[str, dict[str, int]]], None]) -> str:
    folder = shutil.copytree(Path(locate("mini-sana"), "tokenizer"), tmp_path / "tokenizer")
    path = folder / "tokenizer.json"
    definition = json.loads(path.read_text())
    edit(definition["model"])
    path.write_text(json.dumps(definition))
    return part_digests({"tokenizer": AutoTokenizer.from_pretrained(folder)})["tokenizer"]


def test_swapped_tokens_change_the_digest_but_neither_writing_nor_use(digests: dict[str, str], tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(Path(locate("mini-sana"), "tokenizer"))
    tokenizer.backend_tokenizer.enable_truncation(7)
    tokenizer.backend_tokenizer.enable_padding(length=7)
    assert part_digests({"tokenizer": tokenizer})["tokenizer"] == digests["tokenizer"]

    def swap(model: dict[str, dict[str, int]]) -> None:
        vocabulary = model["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    assert edited(tmp_path / "same", lambda model: None) == digests["tokenizer"]
    assert edited(tmp_path / "swapped", swap) != digests["tokenizer"]


def test_a_changed_model_folder_is_named_by_its_part(digests: dict[str, str], tmp_path: Path) -> None:
    folder = shutil.copytree(locate("mini-sana"), tmp_path / "mini-sana")
    config = folder / "vae" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"scaling_factor": 0.5}))
    changed = part_digests(load_backbone(str(folder)).parts)
    assert {name for name, digest in changed.items() if digests[name] != digest} == {"vae"}


@pytest.mark.parametrize("part", sorted(PARTS))
def test_a_missing_or_other_part_is_named(digests: dict[str, str], part: str) -> None:
    check_digests(digests | {"reward:more": "sha256:0"}, digests)
    for theirs in (digests | {part: "sha256:0"}, {name: digest for name, digest in digests.items() if name != part}):
        with pytest.raises(MismatchError) as raised:
            check_digests(theirs, digests)
        error = raised.value
        assert (error.fault, error.where, error.expected) == ("digests", part, digests[part])
        assert str(error).startswith(f"Digests differ: the service's {part}")
        assert error.action.startswith("load the same")


def test_a_reward_without_weights_has_the_digest_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
from functools import partial

class Bright:
    def __call__(self, images, prompts, metadata): return images.mean((1, 2, 3))

def scaled(factor, images, prompts, metadata): return factor * bright(images, prompts, metadata)

bright = Bright()
halved = partial(scaled, 0.5)
"""
    monkeypatch.syspath_prepend(tmp_path)

    def digests_of(text: str) -> set[str]:
        (tmp_path / "bright_rewards.py").write_text(text)
        monkeypatch.delitem(sys.modules, "bright_rewards", raising=False)
        module = importlib.import_module("bright_rewards")
        return {source_digest(getattr(module, name)) for name in ("Bright", "bright", "scaled", "halved")}

    (digest,) = digests_of(text)
    assert digests_of(text) == {digest}
    for edited in (text.replace("0.5", "0.25"), text.replace("mean", "amax"), f"{text}# more\n"):
        assert digests_of(edited).isdisjoint({digest})
