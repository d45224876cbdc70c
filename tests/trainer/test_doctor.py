"""`solrl-train doctor`: what each precision is on this machine, and why it is not native."""

import pytest
import solrl_core.precision
from solrl_trainer.doctor import check


def test_precisions_are_named_with_what_stands_in_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str | None:
        raise ValueError("Transformer Engine is broken: OSError: libcublasLt.so.13: undefined symbol")

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(solrl_core.precision, "engine_version", broken)
    rows = {row[0]: row[1:] for row in check("mini-sana", None, "shapes")}
    assert rows["tier nvfp4"][1].endswith("only a Blackwell GPU has NVFP4 units, this is CPU")
    assert rows["tier fp8"][1] == "not on this device: it takes an Ada, Hopper or Blackwell GPU"
    assert rows["tier bf16"][1] == "emulated: bfloat16 weights, float32 arithmetic"
    assert rows["transformer engine"][0] == "warn"
    assert "undefined symbol" in rows["transformer engine"][1]
    assert "until then nvfp4 is emulated" in rows["transformer engine"][2]
