"""A run's memory: `solrl-train memory` plans it without weights, and says which blocks recompute on which GPU."""

import copy
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from solrl_core import memory_plan
from solrl_core.families import Backbone, load_backbone
from solrl_core.families.backbone import Conditioning
from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.families.skeleton import load_skeleton
from solrl_core.fingerprint import part_digests
from solrl_core.lora import adapter_layout
from solrl_core.memory_plan import RESERVED, plan_memory
from solrl_core.rewards.size import reward_bytes
from solrl_minis import catalog
from solrl_proto.identifiers import Precision
from solrl_trainer.__main__ import main
from solrl_trainer.memory import run_memory, training_memory
from solrl_trainer.memory.run_memory import LayoutSettings, MemoryLayout, RunMemory, plan_run
from solrl_trainer.memory.training_memory import TrainingPlan, iteration_bytes, plan_training
from solrl_trainer.policy.lora import inject
from solrl_trainer.settings.training_sections import Lora
from tests.core.families.tiny_pipelines import write_z_image
from tests.support.small_model import small_model
from tests.support.typed import accepted, refused, typed
from tests.trainer.training_helpers import tiny_config

MIB = 2**20
STAYING = MemoryLayout(sharded=False, offloaded=False, checkpointed=0)
SERVED = "rollout_url=http://gpu-node:8100"


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of training compile, so one is made of each model: bytes are proportional to the rows of the batch."""
    monkeypatch.setattr(run_memory, "plan_training", _plan_training)


def _plan_training(
    backbone: PipelineBackbone, lora: Lora, batch: int, row: Conditioning, guidance: float
) -> TrainingPlan:
    shapes = [tuple(tensor.shape) for part in (row, backbone.transformer.state_dict()) for tensor in part.values()]
    key = (str(shapes), lora.rank, guidance)
    if key not in _PLANS:
        _PLANS[key] = plan_training(backbone, lora, 12, row, guidance)
    return _PLANS[key].scaled(batch / 12)


_PLANS: dict[tuple[Any, ...], TrainingPlan] = {}


@pytest.fixture
def bare(tmp_path: Path) -> PipelineBackbone:
    """The smaller miniature without a single weight."""
    folder = tmp_path / "mini-sana"
    shutil.copytree(small_model(), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return load_skeleton(str(folder))


def planned(backbone: PipelineBackbone, *settings: str, fastest: Precision = "fp8") -> RunMemory:
    return plan_run(tiny_config("rollout_url=null", "optimizer.batch=12", *settings), backbone, fastest)


@pytest.mark.slow
def test_weights_are_those_of_model_and_generators(bare: PipelineBackbone, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (run_memory, memory_plan):
        monkeypatch.setattr(module, "generation_peaks", lambda *_: PLAN.generation)
    alone = planned(bare, "explore.precision=bf16")
    served = plan_memory(bare, ["bf16"], 4).weights
    assert alone.encoders == {"text_encoder": served.pop("text_encoder")}
    served["generator"] = served.pop("served, bf16")
    assert alone.weights == served
    for precision in ("fp8", "nvfp4"):
        explorer = plan_memory(bare, [precision], 4).weights[f"served, {precision}"]
        both = planned(bare, f"explore.precision={precision}")
        assert both.weights == alone.weights | {"explorer": explorer}
    assert planned(bare).weights.keys() - alone.weights.keys() == {"explorer"}
    assert planned(bare, fastest="bf16").weights == alone.weights
    for setting in (SERVED, "regenerate.at=none"):
        assert planned(bare, setting).weights == alone.weights


def test_a_loaded_model_is_planned_like_its_configurations(bare: PipelineBackbone) -> None:
    real = load_backbone(small_model(), dtype=torch.bfloat16)
    before = part_digests(real.parts)
    found = planned(real.on_meta(), "explore.precision=fp8", "optimizer.shard_base=true")
    expected = planned(bare, "explore.precision=fp8", "optimizer.shard_base=true")
    # diffusers keeps some weights in float32.
    assert found.weights == pytest.approx(expected.weights, rel=0.01)
    assert found.sharded == pytest.approx(expected.sharded, rel=0.01)
    for name in ("gathered", "encoders", "iteration", "generation"):
        assert getattr(found, name) == getattr(expected, name)
    assert part_digests(real.parts) == before
    assert not any(part.is_meta for part in real.transformer.parameters())


def test_every_phase_is_planned_at_the_precision_it_runs_at(bare: PipelineBackbone) -> None:
    alone, both = planned(bare, "explore.precision=bf16"), planned(bare, "explore.precision=nvfp4")
    phases = both.phases(STAYING)
    assert alone.phases(STAYING).keys() == {"encode", "decode", "denoise, bf16", "train"}
    assert phases.keys() - alone.phases(STAYING).keys() == {"denoise, nvfp4"}
    peaks = plan_memory(bare, ["nvfp4"], 24).activations
    assert phases["denoise, nvfp4"] == peaks["denoise, nvfp4"]
    assert phases["decode"] == peaks["decode"]
    assert both.total(STAYING) == both.resident(STAYING) + max(phases.values())
    layers = adapter_layout(bare.transformer, bare.lora_targets).values()
    # A [2, in] and B [out, 2] in float32, six times: two policies, two moments, two gradients.
    assert both.training.state == 6 * 4 * 2 * sum(sum(layer) for layer in layers)


PLAN = RunMemory(
    **{"weights": {"transformer": 100 * MIB, "generator": 20 * MIB}, "encoders": {"text_encoder": 40 * MIB}},
    **{"sharded": {"transformer": 30 * MIB, "generator": 5 * MIB}, "gathered": 4 * MIB},
    **{"rewards": {"known": 30 * MIB, "unknown": None}, "iteration": {"samples": 10 * MIB}},
    generation={"encode": 3 * MIB, "denoise, bf16": 12 * MIB, "decode": 25 * MIB},
    training=TrainingPlan(kept=(10 * MIB,) * 4, inputs=(MIB,) * 4, state=5 * MIB),
    settings=LayoutSettings(sharded=False, offloaded=False, checkpointed=None),
)


def with_settings(**settings: Any) -> RunMemory:
    return replace(PLAN, settings=replace(PLAN.settings, **settings))


def gpu_for(layout: MemoryLayout) -> int:
    """Bytes of the smallest GPU that a layout fits in."""
    return RESERVED + PLAN.total(layout)


def test_as_few_blocks_recompute_as_the_gpu_allows_and_the_largest_batch_is_found() -> None:
    four = replace(STAYING, checkpointed=4)
    assert PLAN.resident(STAYING) == (100 + 20 + 40 + 30 + 10 + 5) * MIB
    assert [PLAN.total(layout) - PLAN.resident(layout) for layout in (STAYING, four)] == [(40 + 10) * MIB, 25 * MIB]
    assert PLAN.layout(gpu_for(STAYING)) == STAYING
    assert PLAN.layout(gpu_for(STAYING) - 1).checkpointed == 2
    assert PLAN.layout(0) == four
    assert with_settings(checkpointed=1).layout(0).checkpointed == 1
    assert PLAN.largest_batch(8, gpu_for(STAYING)) == 8
    one = with_settings(checkpointed=0)
    held = RESERVED + PLAN.resident(STAYING)
    assert one.largest_batch(8, held + 26 * MIB) == 4
    assert one.largest_batch(8, held) == 0
    halved = TrainingPlan(kept=(5 * MIB,) * 4, inputs=(MIB // 2,) * 4, state=5 * MIB)
    assert PLAN.training.scaled(0.5) == halved


def test_encoders_leave_the_gpu_if_that_lets_the_run_fit_or_keep_more_activations() -> None:
    free = with_settings(offloaded=None)
    assert free.layout(gpu_for(STAYING)) == STAYING
    # One byte less, and two blocks would recompute beside them.
    offloaded = replace(STAYING, offloaded=True)
    assert free.layout(gpu_for(STAYING) - 1) == offloaded
    assert free.total(offloaded) == free.total(STAYING) - 40 * MIB
    assert PLAN.layout(gpu_for(STAYING) - 1).offloaded is False
    assert with_settings(offloaded=True).layout(10**12) == offloaded
    # They come to encode, while nothing is trained.
    large = replace(free, encoders={"text_encoder": 90 * MIB})
    assert large.phases(offloaded) == PLAN.phases(STAYING) | {"encode": (90 + 3) * MIB}
    # Where the settings determine how many recompute, they leave only if the run does not fit with them.
    every = with_settings(offloaded=None, checkpointed=0)
    assert not every.layout(gpu_for(STAYING)).offloaded
    assert every.layout(gpu_for(STAYING) - 1).offloaded


def test_the_base_is_sharded_if_training_does_not_fit_otherwise() -> None:
    free = with_settings(sharded=None, offloaded=None)
    smallest = MemoryLayout(sharded=False, offloaded=True, checkpointed=4)
    needed = RESERVED + PLAN.resident(smallest) + PLAN.phases(smallest)["train"]
    assert not free.layout(needed).sharded
    found = free.layout(needed - 1)
    assert found == MemoryLayout(sharded=True, offloaded=False, checkpointed=0)
    assert free.resident(found) == (30 + 5 + 40 + 30 + 10 + 5) * MIB
    assert free.phases(found) == {
        "encode": 3 * MIB,
        "denoise, bf16": (12 + 4) * MIB,
        "decode": 25 * MIB,
        "train": (40 + 10 + 4) * MIB,
    }
    assert not with_settings(sharded=False).layout(0).sharded
    assert with_settings(sharded=True).layout(10**12).sharded


@pytest.mark.parametrize(
    ("settings", "ranks", "expected"),
    [
        ((), 1, LayoutSettings(False, None, None)),
        ((), 4, LayoutSettings(None, None, None)),
        (("optimizer.shard_base=true", "optimizer.encoders=cpu"), 4, LayoutSettings(True, True, None)),
        (("optimizer.activation_checkpointing=false",), 1, LayoutSettings(False, None, 0)),
        (("optimizer.activation_checkpointing=true",), 1, LayoutSettings(False, None, 5)),
        (("optimizer.activation_checkpointing=99",), 1, LayoutSettings(False, None, 5)),
        (("optimizer.encoders=gpu", "optimizer.activation_checkpointing=3"), 1, LayoutSettings(False, False, 3)),
    ],
)
def test_settings_determine_the_layout(settings: tuple[str, ...], ranks: int, expected: LayoutSettings) -> None:
    wanted = LayoutSettings.of(tiny_config(*settings), 5, ranks)
    assert wanted == expected
    assert wanted.layout == (replace(STAYING, checkpointed=3) if expected.checkpointed == 3 else None)


def test_samples_are_counted_as_an_iteration_holds_them(loaded: Backbone) -> None:
    config = tiny_config("explore.prompts=3", "explore.candidates=8", "explore.keep=4")
    row = loaded.conditioning("a red circle")
    found = iteration_bytes(config, loaded, row)
    channels, height, width = loaded.latent_shape
    assert found["samples"] == 2 * 3 * 4 * 4 * channels * height * width
    assert found["prompts"] == 3 * sum(tensor.nbytes for tensor in row.values())
    many = iteration_bytes(tiny_config("explore.prompts=100000"), loaded, row)
    assert many["cached prompts"] == many["prompts"] > found["cached prompts"]


def test_a_reward_s_size_is_read_from_its_file_or_known() -> None:
    folder = catalog.WEIGHTS / "mini-clip"
    (file,) = folder.glob("*.safetensors")
    size = reward_bytes("clipscore", {"model": str(folder), "dtype": "float16"})
    assert 0 <= file.stat().st_size - size < 0.1 * size  # it holds these weights and a header
    assert reward_bytes("clipscore", {"model": str(folder)}) == 2 * size
    assert reward_bytes("hpsv2", {"model": "someone/else"}) == 4 * 986_109_775
    assert reward_bytes("hpsv2", {"device": "cpu"}) == 0
    assert reward_bytes("hpsv3", {}) == 2 * 7_748_610_610, "in bfloat16, as published"
    assert reward_bytes("hpsv3", {"dtype": "float32"}) == 4 * 7_748_610_610
    assert reward_bytes("verifier", {}) is None
    with pytest.raises(ValueError, match="got reward 'nope'"):
        reward_bytes("nope", {})


def test_the_command_prints_what_fits() -> None:
    settings, columns = ("--set", "explore.precision=nvfp4"), 40
    done = accepted(main, "memory", *settings, "--gpu", "24", COLUMNS=str(columns))
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= columns
    text = " ".join(done.stdout.replace("│", " ").split())
    for words in ("frozen base", "text encoder", "reward clipscore", "BF16 generator, merged", "largest phase"):
        assert words in text
    assert "local explorer's" in text
    assert "On a GPU of 23.60 GiB the run fits" in text
    assert "0 of 5 blocks recompute" in text
    assert "not counted: verifier, verifier_graded" in text
    assert " 0.0" not in text
    assert "Text encoders stay on the GPU." in text


def test_the_command_says_what_does_not_fit_and_who_decided() -> None:
    served = ("--set", SERVED)
    done = typed(main, "memory", *served, "--set", "optimizer.activation_checkpointing=2", "--gpu", "1", COLUMNS="200")
    assert "On a GPU of 953.67 MiB the run does not fit" in done.stdout
    assert "2 of 5 blocks recompute, as optimizer.activation_checkpointing sets" in done.stdout
    assert "A service explores; `solrl-rollout memory --precision fp8` plans it." in done.stdout
    assert "explore.precision=auto" not in done.stdout
    assert "explore.precision=auto is planned as fp8." in typed(main, "memory", COLUMNS="200").stdout


def test_the_command_plans_each_of_several_gpus() -> None:
    words = ("--set", "optimizer.shard_base=true", "--set", "optimizer.encoders=cpu", "--gpu", "24", "--gpus", "4")
    done = accepted(main, "memory", *words, COLUMNS="200")
    assert "On 4 GPUs of 23.60 GiB the run fits" in done.stdout
    for words in (
        "frozen base, this rank's part",
        "BF16 generator, merged, this rank's part",
        "train: weights of the block at work",
        "stay in host memory, except while prompts are encoded, as optimizer.encoders sets.",
        "The base is sharded across the 4 ranks, as optimizer.shard_base sets.",
    ):
        assert words in done.stdout
    assert "text encoder " not in done.stdout.partition("largest phase")[0]
    done = typed(main, "memory", "--set", "optimizer.shard_base=true")
    assert done.stderr.splitlines()[-1].endswith("is true for one GPU; expected several: --gpus 4")
    assert "got --gpus 0; expected at least 1" in typed(main, "memory", "--gpus", "0").stderr
    assert "got --gpu 0; expected the GPU's memory in GB" in refused(main, "memory", "--gpu", "0")


def test_the_command_names_a_micro_batch_that_fits() -> None:
    words = ("--set", "optimizer.batch=4096", "--set", "optimizer.activation_checkpointing=0", "--gpu", "6")
    done = typed(main, "memory", *words, COLUMNS="200")
    assert "the run does not fit" in done.stdout
    found = re.search(r"It fits with optimizer.batch=(\d+)\.", done.stdout)
    again = ("--set", f"optimizer.batch={found[1]}", *words[2:])
    assert "On a GPU of 5.59 GiB the run fits" in typed(main, "memory", *again, COLUMNS="200").stdout


def low_precision(name: str) -> PipelineBackbone:
    """A miniature with a GPU's dtypes."""
    backbone = load_backbone(name)
    assert isinstance(backbone, PipelineBackbone)
    backbone.transformer.bfloat16()
    backbone.dtype = torch.bfloat16
    return backbone


def kept_by(backbone: PipelineBackbone, lora: Lora, batch: int) -> int:
    """Bytes that all blocks keep for a gradient in eager mode."""
    transformer = copy.deepcopy(backbone.transformer)
    backbone.fuse(transformer)
    inject(transformer, backbone.lora_targets, lora.rank, lora.alpha)
    blocks = [block for name in backbone.blocks for block in transformer.get_submodule(name).children()]
    weights = {weight.untyped_storage().data_ptr() for weight in transformer.parameters()}
    saved: dict[int, torch.Tensor] = {}
    total = 0

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in weights:
            saved[x.untyped_storage().data_ptr()] = x
        return x

    def before(*_: Any) -> None:
        saved.clear()

    def after(*_: Any) -> None:
        nonlocal total
        total += sum(x.untyped_storage().nbytes() for x in saved.values())

    for block in blocks:
        block.register_forward_pre_hook(before)
        block.register_forward_hook(after)
    row = backbone.encode(["a"])
    rows = {name: value.expand(batch, *value.shape[1:]).contiguous() for name, value in row.items()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        latents = torch.randn(batch, *backbone.latent_shape)
        backbone.velocity(transformer, latents, torch.full((batch,), 0.5), rows)
    return total


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["mini-flux", *(pytest.param(name, marks=pytest.mark.release) for name in ("mini-sana", "mini-sd3"))]
)
def test_activations_of_blocks_are_counted_without_values(name: str) -> None:
    backbone, lora = low_precision(name), Lora(rank=4, alpha=8)
    before = {key: value.clone() for key, value in backbone.transformer.state_dict().items()}
    plan = plan_training(backbone, lora, 8, backbone.encode(["a"]))
    after = backbone.transformer.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    blocks = sum(len(list(backbone.transformer.get_submodule(part).children())) for part in backbone.blocks)
    assert len(plan.kept) == len(plan.inputs) == blocks
    assert all(0 < inputs < kept for inputs, kept in zip(plan.inputs, plan.kept, strict=True))
    # A compiler recomputes cheap operations, so it keeps hardly more than eager mode, and at least half.
    eager = kept_by(backbone, lora, 8)
    assert 0.5 * eager < sum(plan.kept) < 1.1 * eager


def test_blocks_that_run_twice_keep_twice_as_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_memory, "_count", lambda *_: (7, 3))  # it compiles
    backbone, lora = load_backbone(str(write_z_image(tmp_path / "z-image"))), Lora(rank=4, alpha=8)
    once, twice = (plan_training(backbone, lora, 2, backbone.encode(["a"], scale), scale) for scale in (1.0, 3.0))
    assert (once.kept, once.inputs) == ((7,) * 4, (3,) * 4)
    assert (twice.kept, twice.inputs) == ((14,) * 4, (6,) * 4)


@torch._dynamo.config.patch(recompile_limit=1, accumulated_recompile_limit=1)
def test_one_process_may_plan_any_number_of_micro_batches() -> None:
    """Bytes are proportional to the rows of the batch."""
    backbone, lora = low_precision(small_model()), Lora(rank=4, alpha=8)
    row = backbone.encode(["a"])
    whole, part = (sum(plan_training(backbone, lora, batch, row).kept) for batch in (32, 3))
    assert part == pytest.approx(whole * 3 / 32, rel=0.05)
