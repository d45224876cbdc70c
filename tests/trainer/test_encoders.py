"""Text encoders that wait in host memory: they are moved once per iteration, and change no result."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from solrl_core.families import load_backbone
from solrl_core.families.backbone import PromptCache
from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.fingerprint import part_digests
from solrl_trainer.loop import train
from solrl_trainer.policy.encoders import Encoders
from solrl_trainer.rollouts.models import Models
from tests.support.small_model import small_model
from tests.trainer.real_runs import Watcher
from tests.trainer.training_helpers import PROMPTS, QUICK, tiny_config
from torch import nn

Move = tuple[str, str]
"""Class of a moved encoder, and the device."""


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[Move]:
    found: list[Move] = []
    to = nn.Module.to

    def counted(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if type(module).__module__.startswith("transformers") and isinstance(args[0], torch.device):
            found.append((type(module).__name__, args[0].type))
        return to(module, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "to", counted)
    return found


def loaded(name: str, device: str = "cpu") -> PipelineBackbone:
    return load_backbone(name, device=device, waiting=True)


def test_offloaded_encoders_come_and_leave_once_for_many_prompts(moves: list[Move]) -> None:
    backbone = loaded("mini-sd3")
    encoders = Encoders(backbone, offloaded=True)
    kinds = sorted(type(encoder).__name__ for encoder in backbone.text_encoders.values())
    moves.clear()
    encoders.encode(PROMPTS, 1.0)
    assert sorted(kind for kind, _ in moves[: len(kinds)]) == sorted(kind for kind, _ in moves[len(kinds) :]) == kinds
    moves.clear()
    encoders.encode(PROMPTS, 1.0)
    found = [backbone.conditioning(prompt) for prompt in PROMPTS]
    assert moves == []  # all are in the cache
    backbone.conditioning("a prompt that nobody announced")
    assert len(moves) == 2 * len(kinds)
    moves.clear()
    other = loaded("mini-sd3")
    staying = Encoders(other, offloaded=False)
    staying.encode(PROMPTS, 1.0)
    for prompt, row in zip(PROMPTS, found, strict=True):
        assert all(torch.equal(row[key], value) for key, value in other.conditioning(prompt).items())
    assert moves == [(kind, "cpu") for kind, _ in moves]
    assert len(moves) == len(kinds)  # to their place, at first


def test_the_prompts_of_an_iteration_stay_encoded(moves: list[Move]) -> None:
    backbone = loaded("mini-sd3")
    vars(backbone)["_prompts"] = PromptCache(1)  # too small for any
    models = Models.build(backbone, tiny_config(f"explore.prompts={len(PROMPTS)}", "optimizer.encoders=cpu"))
    models.encoders.encode(PROMPTS, 1.0)
    moves.clear()
    rows = [backbone.conditioning(prompt) for prompt in PROMPTS]
    assert moves == []
    assert all(backbone.conditioning(prompt) is row for prompt, row in zip(PROMPTS, rows, strict=True))


def test_they_leave_after_an_error(moves: list[Move], monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = loaded("mini-sana")
    encoders = Encoders(backbone, offloaded=True)
    (encoder,) = backbone.text_encoders.values()
    moves.clear()

    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(encoder, "forward", fail)
    with pytest.raises(torch.OutOfMemoryError):
        encoders.encode(PROMPTS, 1.0)
    with pytest.raises(torch.OutOfMemoryError):
        backbone.conditioning(PROMPTS[0])
    assert len(moves) == 4


def test_a_run_moves_them_once_per_iteration_and_trains_the_same(moves: list[Move], tmp_path: Path) -> None:
    adapters = {}
    for where in ("gpu", "cpu"):
        overrides = (*QUICK, f"model={small_model()}", "rollout_url=null", "evaluate.prompts=2", "iterations=2")
        moves.clear()
        config = tiny_config(*overrides, f"optimizer.encoders={where}", output=tmp_path / where, run=where)
        train(config, Watcher())
        adapters[where] = (config.output / "checkpoints" / "000002" / "state.safetensors").read_bytes()
        # At first; for the evaluation; and for each of two iterations.
        assert len(moves) == (1 + 2 + 2 * 2 if where == "cpu" else 1)
    assert adapters["cpu"] == adapters["gpu"]


def test_waiting_parts_have_the_same_digests() -> None:
    whole, waiting = load_backbone("mini-flux"), loaded("mini-flux")
    assert waiting.device == torch.device("cpu")
    assert part_digests(waiting.parts, waiting.device) == part_digests(whole.parts)


def test_inputs_follow_an_offloaded_encoder() -> None:
    """A pipeline may send its tokens to where the encoder is before the call."""
    seen = []

    class Encoder(nn.Module):
        def forward(self, ids: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
            seen.extend([ids.device.type, mask.device.type])
            return ids

    encoder = Encoder()
    backbone = SimpleNamespace(device=torch.device("meta"), text_encoders={"text_encoder": encoder})
    Encoders(backbone, offloaded=True)  # type: ignore[arg-type]
    encoder(torch.zeros(1, 4), mask=torch.ones(1, 4))
    assert seen == ["meta", "meta"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mini-sana", "mini-sd3", "mini-flux"])
def test_on_a_gpu_they_wait_in_host_memory(name: str) -> None:
    rows = {}
    for where in ("gpu", "cpu"):
        backbone = loaded(name, "cuda")
        assert not any(weight.is_cuda for weight in backbone.transformer.parameters())
        whole = load_backbone(name, device="cuda")
        assert part_digests(backbone.parts, backbone.device) == part_digests(whole.parts)
        settings = (f"optimizer.encoders={where}", "optimizer.activation_checkpointing=0")
        models = Models.build(backbone, tiny_config(*settings))
        assert all(weight.is_cuda for weight in models.policy.transformer.parameters())
        before = torch.cuda.memory_allocated()
        models.encoders.encode(PROMPTS[:3], 1.0)
        rows[where] = [backbone.conditioning(prompt) for prompt in PROMPTS]
        assert all(value.is_cuda for row in rows[where] for value in row.values())
        weights = [weight for encoder in backbone.text_encoders.values() for weight in encoder.parameters()]
        assert all(weight.is_cuda == (where == "gpu") for weight in weights)
        if where == "cpu":
            cached = sum(value.untyped_storage().nbytes() for row in rows[where] for value in row.values())
            assert torch.cuda.memory_allocated() - before < cached + sum(weight.nbytes for weight in weights) / 2
        models.generator.generate(PROMPTS[0], [1], steps=1)
    for one, other in zip(rows["gpu"], rows["cpu"], strict=True):
        assert all(torch.equal(value, other[key]) for key, value in one.items())


@pytest.mark.gpu
def test_the_plan_decides_on_a_gpu(notes: list[str]) -> None:
    Models.build(loaded("mini-flux", "cuda"), tiny_config("rollout_url=null"))
    assert len(notes) == 1
    assert "0 recompute them" in notes[0]
