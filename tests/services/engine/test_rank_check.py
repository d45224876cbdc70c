"""The check of ranks at a model's first load: what it finds, stores and answers."""

import json
from pathlib import Path

import pytest
from solrl_core.families import load_backbone
from solrl_core.rewards import RewardSet
from solrl_core.rewards.reward import PlainDefaults
from solrl_engine.local_backend import LocalBackend
from solrl_engine.precision_check import PROMPTS
from solrl_proto.rollouts import Plan
from solrl_rollout.engine import backends, rank_check
from solrl_rollout.engine.backends import load_backend
from solrl_rollout.engine.rank_check import choose_precision
from solrl_rollout.settings import ModelSpec, RolloutSettings
from tests.support.outlier_models import save_with_outliers
from tests.support.service_helpers import running_service


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check of few prompts and steps."""
    sizes = {"PROMPTS": PROMPTS[:2], "_CANDIDATES": 8, "_PLAN": Plan(steps=3), "_TRUE_STEPS": 5}
    for name, value in sizes.items():
        monkeypatch.setattr(rank_check, name, value)


@pytest.fixture(scope="module")
def with_outliers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """mini-flux with outliers before a layer that is quantised at nvfp4."""
    folder = tmp_path_factory.mktemp("models") / "flux"
    save_with_outliers(folder, "transformer_blocks.1.attn", 1e4, keep=[])
    return folder


def loaded(model: str) -> tuple[LocalBackend, RewardSet]:
    backbone = load_backbone(model, device="cpu")
    return LocalBackend(backbone), RewardSet.load(["clipscore"], PlainDefaults(backbone.device, backbone.options))


@pytest.mark.slow
@pytest.mark.usefixtures("_small")
def test_a_first_load_is_checked_and_later_ones_read_it(tmp_path: Path) -> None:
    backend, rewards = loaded("mini-flux")
    precision, found = choose_precision("flux", backend, rewards, "nvfp4", tmp_path)
    assert precision == "nvfp4"
    assert found is not None
    assert found.trusted
    assert found.low > 0.6 or found.prompts == 2
    (file,) = tmp_path.iterdir()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"spearman": 0.77}))
    _, again = choose_precision("flux", backend, rewards, "nvfp4", tmp_path)
    assert again is not None
    assert again.spearman == 0.77
    file.write_text("{")  # written in part
    assert choose_precision("flux", backend, rewards, "nvfp4", tmp_path)[1] == found


def test_bf16_and_what_cannot_be_judged_are_not_checked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    backend, rewards = loaded("mini-flux")
    assert choose_precision("flux", backend, rewards, None, tmp_path) == ("bf16", None)
    assert choose_precision("flux", backend, rewards.only(()), "nvfp4", tmp_path) == ("nvfp4", None)
    assert "no built-in reward is computed here" in caplog.text
    assert choose_precision("flux", backend, rewards, "nvfp4", None) == ("nvfp4", None)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("_small")
def test_auto_takes_the_next_precision_when_one_does_not_rank(
    with_outliers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend, rewards = loaded(str(with_outliers))
    native = [one.model_copy(update={"numerics": "native"}) for one in backend.capabilities.precisions]
    monkeypatch.setattr(backend, "capabilities", type(backend.capabilities)(tuple(native), overlaps=False))
    assert choose_precision("flux", backend, rewards, None, tmp_path) == ("bf16", None)
    assert "flux at nvfp4 does not rank as in BF16: Spearman" in caplog.text
    assert "the next precision is tried" in caplog.text


@pytest.mark.release
def test_each_answer_of_an_asked_precision_that_does_not_rank_warns(with_outliers: Path, tmp_path: Path) -> None:
    flags = ("--precision", "nvfp4", "--checks", str(tmp_path))
    with running_service(*flags, model=f"flux={with_outliers}") as service:
        (model,) = service.client.get("/v1/models").json()["models"]
        fidelity = {one["precision"]: one["rank_fidelity"] for one in model["precisions"]}
        assert fidelity["bf16"] is None
        assert not fidelity["nvfp4"]["trusted"]
        assert "flux at nvfp4 does not rank as in BF16: Spearman" in service.rollout(model="flux")["warning"]
        assert "warning" not in service.rollout(model="flux", precision="bf16")


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
    served = [
        [one.precision for one in load_backend(spec, RolloutSettings(**given, **more)).capabilities.precisions]
        for more in ({}, {"emulate": True, "precision": "nvfp4"})
    ]
    assert served == [["bf16"], ["nvfp4", "bf16"]]
