"""`solrl-train doctor`, and its agreement with `solrl-rollout doctor`."""

import pytest
import solrl_core.precision
import solrl_rollout.cli
import solrl_trainer.commands.cli
from solrl_rollout.doctor import check as check_service
from solrl_rollout.settings import RolloutSettings
from solrl_trainer.commands.doctor import check
from tests.support.ports import free_port
from tests.support.typed import typed


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)


def test_unsupported_precisions_are_shown_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str | None:
        raise ValueError("Transformer Engine is broken: OSError: libcublasLt.so.13: undefined symbol")

    monkeypatch.setattr(solrl_core.precision, "engine_version", broken)
    rows = {finding.subject: finding for finding in check("mini-sana", None, "shapes")}
    assert rows["precision nvfp4"].text.endswith("only a Blackwell GPU has NVFP4 units, this is CPU")
    assert rows["precision fp8"].state == "n/a"
    assert rows["precision fp8"].text == "not on this device: it takes an Ada, Hopper or Blackwell GPU"
    assert rows["precision bf16"].text == "emulated: bfloat16 weights, float32 arithmetic"
    assert rows["transformer engine"].state == "warn"
    assert "undefined symbol" in rows["transformer engine"].text
    assert "until then nvfp4 is emulated" in rows["transformer engine"].action


@pytest.mark.parametrize("model", ["mini-sana", "mini-sanna", "gated/model"])
def test_both_doctors_agree(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}")
    own = {"prompts"}
    there = {"adapter store", "access", "port", "workers"}
    ours = [finding for finding in check(model, None, "shapes") if finding.subject not in own]
    theirs = [finding for finding in check_service(RolloutSettings(model=(model,))) if finding.subject not in there]
    assert ours == theirs
    assert "reward clipscore" in {finding.subject for finding in ours}
    codes = {
        typed(program, "doctor", "--model", model, *more).returncode
        for program, more in ((solrl_trainer.commands.cli.main, ()), (solrl_rollout.cli.main, ("--port", "0")))
    }
    assert codes == {int(model != "mini-sana")}


def test_unknown_prompts_and_rewards_and_an_unreachable_service_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    rows = {finding.subject: finding for finding in check("mini-sana", url, "shape")}
    assert rows["prompts"].state == rows["service"].state == "missing"
    assert "did you mean 'shapes'" in rows["prompts"].text
    assert url in rows["service"].text
    assert "solrl-rollout serve" in rows["service"].action
    (last,) = [finding for finding in check("mini-sana", "htp://x", "shapes") if finding.subject == "service"]
    assert last.state == "missing"
    assert "expected http://HOST:PORT" in last.text
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}")
    done = typed(solrl_trainer.commands.cli.main, "doctor", "--rewards", "clipscore", "clipscor")
    assert done.returncode == 1
    assert "did you mean 'clipscore'" in done.stdout
