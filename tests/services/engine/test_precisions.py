"""Which precisions a service offers."""

import pytest
from solrl_core.families import load_backbone
from solrl_rollout.engine import backends
from solrl_rollout.engine.backends import load_backend
from solrl_rollout.settings import ModelSpec, RolloutSettings


def test_a_gpu_without_units_refuses_nvfp4_before_it_loads_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulation must be asked for, because it would be slower than BF16."""
    monkeypatch.setattr(backends, "nvfp4_obstacle", lambda device: "compute capability 9.0, NVFP4 needs 10.0")
    loads: list[str] = []

    def load(location: str, **_: object) -> object:
        loads.append(location)
        return load_backbone("mini-flux")

    monkeypatch.setattr(backends, "load_backbone", load)
    spec = ModelSpec("flux", "mini-flux", None)
    given = {"models": ["mini-flux"], "device": "cuda:0"}
    with pytest.raises(ValueError, match=r"needs 10.0. Emulated, it is slower than BF16: .* --emulate"):
        load_backend(spec, RolloutSettings(**given, precision="nvfp4"))
    assert not loads
    for more, served in (({}, ["bf16"]), ({"emulate": True, "precision": "nvfp4"}, ["nvfp4", "bf16"])):
        capabilities = load_backend(spec, RolloutSettings(**given, **more)).capabilities
        assert [info.precision for info in capabilities.precisions] == served
        assert capabilities.fastest == "bf16"  # auto never emulates
