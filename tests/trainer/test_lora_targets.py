"""`lora.targets` chooses layers by pattern, in training, in the memory plan, at a service and in files."""

import json
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file
from solrl_core.adapter import decode_adapter
from solrl_core.families import load_backbone
from solrl_core.lora import adapter_layout
from solrl_trainer.__main__ import main
from solrl_trainer.commands.run import run
from solrl_trainer.memory import training_memory
from solrl_trainer.memory.training_memory import plan_training
from solrl_trainer.policy.policy import Policy
from solrl_trainer.settings.presets import resolve
from solrl_trainer.settings.training_sections import Lora
from tests.support.service_helpers import RunningService
from tests.support.small_model import small_model
from tests.support.typed import accepted, typed
from tests.trainer.training_helpers import QUICK, run_config

VALUES = r".*attn1\.to_v"
SMALL = (
    *QUICK,
    *(f"model={small_model()}", f"lora.targets={json.dumps(VALUES)}", "explore.prompts=1", "iterations=2"),
    *("optimizer.learning_rate=1e-2", "policy.decay_max=0", "explore.precision=bf16"),
)


def test_a_run_trains_the_chosen_layers_alone(small_service: RunningService, tmp_path: Path) -> None:
    run(run_config("mini-sana/sol_rl/clipscore", tmp_path / "run", *SMALL, rollout_url=small_service.url))
    backbone = load_backbone(small_model())
    layout = adapter_layout(backbone.transformer, backbone.lora_targets)
    chosen = {name for name in layout if re.fullmatch(VALUES, name)}
    assert 0 < len(chosen) < len(layout)
    folder = tmp_path / "run" / "checkpoints" / "000002"
    pushed = decode_adapter((folder / "adapter.safetensors").read_bytes(), layout)
    assert {name for name in layout if pushed.delta(name).any()} == chosen
    accepted(main, "export", str(tmp_path / "run"), "--output", str(tmp_path / "out"), "--merged")
    lora = load_file(tmp_path / "out" / "lora.safetensors")
    assert {name.removeprefix("transformer.").rpartition(".lora_")[0] for name in lora} == chosen
    model = tmp_path / "model"
    model.mkdir()
    (model / "model_index.json").write_text("{}")
    done = typed(main, "export", str(tmp_path / "run"), "--output", str(model), "--merged")
    assert done.returncode != 0
    assert f"got --merged into {model}, which has model_index.json" in done.stderr
    assert [path.name for path in model.iterdir()] == ["model_index.json"]
    assert typed(main, "evaluate", str(tmp_path / "run"), "--rewards", "clipscore").returncode == 0


def test_the_memory_plan_counts_the_chosen_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_memory, "_count", lambda *_: (7, 3))  # it compiles
    backbone = load_backbone(small_model())
    row = backbone.encode(["a red circle"])
    whole, some = (plan_training(backbone, Lora(rank=2, targets=one), 2, row) for one in (None, VALUES))
    assert 0 < some.state < whole.state


def test_a_pattern_that_binds_nothing_is_refused() -> None:
    backbone = load_backbone(small_model())
    with pytest.raises(ValueError, match=r"lora\.targets='to_v' matches none .*, such as transf.*\.to_q"):
        Policy(backbone, Lora(targets="to_v"), seed=0)
    with pytest.raises(ValueError, match=r"lora\.targets .*'\(' is no regular expression: missing \)"):
        resolve("mini-sana/sol_rl/clipscore", overrides=["lora.targets='('"])
