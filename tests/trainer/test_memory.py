"""`solrl-train memory`: a run's memory is planned without weights, and says which blocks recompute on which GPU."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from solrl_core.families import Backbone
from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.families.skeleton import load_skeleton
from solrl_core.lora import adapter_layout
from solrl_core.memory import RESERVED, plan_memory
from solrl_core.rewards.size import reward_bytes
from solrl_minis import catalog
from solrl_proto.identifiers import Tier
from solrl_trainer import run_memory
from solrl_trainer.cli import main
from solrl_trainer.run_memory import RunMemory, plan_run
from solrl_trainer.training_memory import TrainingPlan, iteration_bytes
from training_helpers import tiny_config
from typed import typed

MIB = 2**20
LOCAL = ("explore.source=local", "optimizer.batch=12")


@pytest.fixture
def bare(tmp_path: Path) -> PipelineBackbone:
    """The miniature without a single weight."""
    folder = tmp_path / "mini-sana"
    shutil.copytree(catalog.mini_sana(), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return load_skeleton(str(folder))


def planned(backbone: PipelineBackbone, *settings: str, fastest: Tier = "fp8") -> RunMemory:
    return plan_run(tiny_config(*LOCAL, *settings), backbone, fastest)


def test_weights_are_those_of_the_model_and_of_each_generator(
    bare: PipelineBackbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_memory, "plan_training", lambda *_: PLAN.training)  # it compiles
    alone = planned(bare, "explore.precision=bf16")
    served = plan_memory(bare, "bf16", 4).weights
    assert alone.weights == {name: served[name] for name in served if name != "served"} | {
        "generator": served["served"]
    }
    for precision in ("fp8", "nvfp4"):
        both = planned(bare, f"explore.precision={precision}")
        assert both.weights == alone.weights | {"explorer": plan_memory(bare, precision, 4).weights["served"]}
    assert planned(bare).weights.keys() - alone.weights.keys() == {"explorer"}
    assert planned(bare, fastest="bf16").weights == alone.weights
    assert planned(bare, "explore.source=service").weights == alone.weights
    assert planned(bare, "explore.source=service", "optimizer.reference=fp8").weights["reference"] > 0


def test_every_phase_is_planned_at_the_precision_it_runs_at(bare: PipelineBackbone) -> None:
    alone, both = planned(bare, "explore.precision=bf16"), planned(bare, "explore.precision=nvfp4")
    assert alone.phases(0).keys() == {"encode", "decode", "denoise, bf16", "train"}
    assert both.phases(0).keys() - alone.phases(0).keys() == {"denoise, nvfp4"}
    peaks = plan_memory(bare, "nvfp4", 24).activations
    assert both.phases(0)["denoise, nvfp4"] == peaks["denoise"]
    assert both.phases(0)["decode"] == peaks["decode"]
    assert both.total(0) == both.held + max(both.phases(0).values())
    layers = adapter_layout(bare.transformer, bare.lora_targets).values()
    # A [2, in] and B [out, 2] in float32, six times: two policies, two moments, two gradients.
    assert both.training.state == 6 * 4 * 2 * sum(sum(layer) for layer in layers)


PLAN = RunMemory(
    weights={"transformer": 100 * MIB, "generator": 20 * MIB},
    rewards={"known": 30 * MIB, "unknown": None},
    iteration={"samples": 10 * MIB},
    generation={"decode": 25 * MIB},
    training=TrainingPlan(kept=(10 * MIB,) * 4, inputs=(MIB,) * 4, state=5 * MIB),
    wanted=None,
)


def test_as_few_blocks_recompute_as_the_gpu_allows() -> None:
    assert PLAN.held == (100 + 20 + 30 + 10 + 5) * MIB
    assert [PLAN.total(count) - PLAN.held for count in (0, 4)] == [(40 + 10) * MIB, 25 * MIB]
    assert PLAN.recomputed(RESERVED + PLAN.total(0)) == 0
    assert PLAN.recomputed(RESERVED + PLAN.total(0) - 1) == 2
    assert PLAN.recomputed(0) == 4
    assert replace(PLAN, wanted=1).recomputed(0) == 1


def test_samples_are_counted_as_an_iteration_holds_them(loaded: Backbone) -> None:
    config = tiny_config("explore.prompts=3", "explore.candidates=8", "explore.keep=4")
    row = loaded.conditioning("a red circle")
    found = iteration_bytes(config, loaded, row)
    channels, height, width = loaded.latent_shape
    assert found["samples"] == 2 * 3 * 4 * 4 * channels * height * width
    assert found["prompts"] == 3 * sum(tensor.nbytes for tensor in row.values())


def test_a_reward_s_size_is_read_from_its_file_or_known() -> None:
    folder = catalog.WEIGHTS / "mini-clip"
    (file,) = folder.glob("*.safetensors")
    size = reward_bytes("clipscore", {"model": str(folder), "dtype": "float16"})
    assert size is not None
    assert 0 <= file.stat().st_size - size < 0.1 * size  # it holds these weights and a header
    assert reward_bytes("clipscore", {"model": str(folder)}) == 2 * size
    assert reward_bytes("hpsv2", {"model": "someone/else"}) == 4 * 986_109_775
    assert reward_bytes("hpsv2", {"device": "cpu"}) == 0
    assert reward_bytes("verifier", {}) is None
    with pytest.raises(ValueError, match="got reward 'nope'"):
        reward_bytes("nope", {})


@pytest.mark.parametrize("columns", [40, 100])
def test_the_command_prints_what_fits(tmp_path: Path, columns: int) -> None:
    settings = ("--set", "explore.source=local", "--set", "explore.precision=nvfp4", "--set", "optimizer.batch=8")
    out = tmp_path / "plans" / "plan.json"
    done = typed(main, "memory", *settings, "--gpu", "24", "--out", str(out), COLUMNS=str(columns))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= columns
    text = " ".join(done.stdout.replace("│", " ").split())
    for words in ("frozen base", "text encoder", "reward clipscore", "BF16 generator, merged", "largest phase"):
        assert words in text
    assert "On a GPU of 24 GB the run fits" in text
    assert "0 of 5 blocks recompute" in text
    assert "not counted: verifier, verifier_graded" in text
    assert " 0.0" not in text
    written = json.loads(out.read_text())
    assert written["recomputed"] == 0
    assert written["weights"]["explorer"] > 0
    assert written["gpu"] == 24 * 10**9


def test_the_command_says_what_does_not_fit_and_who_decided() -> None:
    done = typed(main, "memory", "--set", "optimizer.checkpointing=2", "--gpu", "1", COLUMNS="200")
    assert "On a GPU of 1 GB the run does not fit" in done.stdout
    assert "2 of 5 blocks recompute, as optimizer.checkpointing sets" in done.stdout
    assert "`solrl-rollout memory` plans its GPU" in done.stdout
    assert "explore.precision=auto" not in done.stdout
    done = typed(main, "memory", "--set", "explore.source=local", "--set", "optimizer.batch=4", COLUMNS="200")
    assert "explore.precision=auto is planned as fp8." in done.stdout


def test_a_gpu_without_memory_is_refused() -> None:
    done = typed(main, "memory", "--gpu", "0")
    assert done.returncode == 2
    assert "got --gpu 0; expected the GPU's memory in GB" in done.stderr
