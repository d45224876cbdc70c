"""Findings of the services' `doctor`: models in folders, in the hub's cache and on the hub; the printed table."""

import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from solrl_core import diagnosis
from solrl_core.diagnosis import Finding
from solrl_core.families import load_backbone
from solrl_core.families.load import locate
from solrl_core.precision.support import PrecisionSupport

COMMIT = "0" * 40
WEIGHTS = ("text_encoder/model", "transformer/diffusion_pytorch_model", "vae/diffusion_pytorch_model")
INDEX = b'{"_class_name": "KolorsPipeline"}'
MINI_SANA = Path(locate("mini-sana"))
MINI_CLIP = MINI_SANA.parent / "mini-clip"


class Hub(BaseHTTPRequestHandler):
    """A hub that gives one file of `open/model`, to `gated/model` only with a token, and none of the others."""

    def do_HEAD(self) -> None:
        repository = "/".join(self.path.split("/")[1:3])
        granted = repository == "gated/model" and self.headers.get("Authorization") == "Bearer hf_good"
        faults = {"gated/model": (403, "GatedRepo"), "plain/model": (404, "EntryNotFound")}
        status, fault = faults.get(repository, (401, "RepoNotFound"))
        if granted or repository == "open/model":
            self.send_response(200)
            self.send_header("ETag", '"1"')
            self.send_header("X-Repo-Commit", COMMIT)
        else:
            self.send_response(status)
            self.send_header("X-Error-Code", fault)
        self.send_header("Content-Length", str(len(INDEX)))
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(INDEX)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache on this machine, empty; nothing else is reachable."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/{revision}/{filename}")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return tmp_path / "hub"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub that answers."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield
    server.shutdown()
    server.server_close()


def cached(cache: Path, name: str, content: Path = MINI_SANA) -> Path:
    """A whole model in the hub's cache, or another folder."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    return Path(shutil.copytree(content, repository / "snapshots" / COMMIT))


@pytest.mark.usefixtures("hub")
def test_the_token_of_the_environment_opens_a_gated_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    assert diagnosis.model("gated/model").state == "missing"
    with pytest.raises(OSError, match="accept the terms"):
        load_backbone("gated/model")
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    assert diagnosis.model("gated/model").state == "warn"
    # Its model_index.json is read and names a pipeline without a family.
    with pytest.raises(ValueError, match="got family 'KolorsPipeline'"):
        load_backbone("gated/model")


@pytest.mark.usefixtures("cache")
def test_without_a_network_a_model_is_missing_and_the_token_is_named() -> None:
    finding = diagnosis.model("gated/model")
    assert finding.state == "missing"
    assert "the hub cannot be reached" in finding.action
    assert "HF_TOKEN" in finding.action


def test_a_model_in_the_hubs_cache_is_ok_when_it_is_whole(cache: Path) -> None:
    folder = cached(cache, "some/model")
    assert diagnosis.model("some/model") == Finding("model", "ok", "some/model, in the hub's cache on this machine")
    # As `solrl-rollout memory` leaves it, which needs no weights.
    for weights in folder.glob("*/*.safetensors"):
        weights.unlink()
    finding = diagnosis.model("some/model")
    assert finding.state == "missing"
    assert all(f"{part}.safetensors" in finding.text for part in WEIGHTS)


def reward(name: str, **options: str) -> Finding:
    """The finding about a reward that is needed, with options that are given for it."""
    return next(diagnosis.rewards([name], "a/model", options={name: options}))


@pytest.mark.parametrize(
    ("name", "state", "action"),
    [
        ("gated/model", "missing", "accept the terms at https://huggingface.co/gated/model, and set HF_TOKEN"),
        ("private/model", "missing", "set HF_TOKEN to a token that may read it"),
        ("plain/model", "missing", "the hub has no {file} there"),
        ("open/model", "warn", "`hf download open/model`"),
    ],
)
@pytest.mark.parametrize("file", ["model_index.json", "config.json"], ids=["model", "weights of a reward"])
@pytest.mark.usefixtures("hub")
def test_what_the_hub_has_is_not_ok_before_it_is_here(name: str, state: str, action: str, file: str) -> None:
    finding = reward("clipscore", model=name) if file == "config.json" else diagnosis.model(name)
    assert finding.state == state
    assert finding.text == f"{name}: it is not in the hub's cache on this machine"
    assert action.format(file=file) in finding.action


def test_weights_of_a_reward_are_where_options_say_or_whole_in_the_hubs_cache(cache: Path) -> None:
    folder = cached(cache, "openai/clip-vit-large-patch14", MINI_CLIP)
    assert reward("clipscore") == Finding("reward clipscore", "ok", "openai/clip-vit-large-patch14")
    (folder / "tokenizer_config.json").unlink()
    assert reward("clipscore").state == "missing"
    assert reward("clipscore", processor=str(MINI_CLIP)).state == "ok"
    (folder / "model.safetensors").unlink()
    finding = reward("clipscore", processor=str(MINI_CLIP))
    assert finding.state == "missing"
    assert "its weights are missing or incomplete" in finding.text
    # A model's options say where its rewards are.
    named = ["clipscore", "hpsv2", "imagereward", "pickscore"]
    assert {finding.state for finding in diagnosis.rewards(named, "mini-sana")} == {"ok"}


@pytest.mark.parametrize("lost", ["config.json", "model.safetensors", "tokenizer_config.json"])
def test_a_folder_of_a_reward_that_is_not_whole_is_not_ok(tmp_path: Path, lost: str) -> None:
    folder = Path(shutil.copytree(MINI_CLIP, tmp_path / "clip"))
    assert reward("clipscore", model=str(folder)).state == "ok"
    (folder / lost).unlink()
    finding = reward("clipscore", model=str(folder))
    assert (finding.state, finding.text) == ("missing", f"{folder}: incomplete")


@pytest.mark.usefixtures("cache")
def test_a_checkpoint_of_a_reward_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "HPS.pt"
    assert reward("hpsv2", checkpoint=str(path)) == Finding(
        "reward hpsv2", "missing", f"{path}: not a file", "give its place by the reward's option 'checkpoint'"
    )
    path.touch()
    assert reward("hpsv2", checkpoint=str(path), processor=str(MINI_CLIP)).state == "ok"
    # The file of its configuration lies beside it.
    assert "med_config.json: not a file" in reward("imagereward", checkpoint=str(path)).text


@pytest.mark.usefixtures("cache")
def test_a_reward_without_its_packages_is_not_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: set[str] = set()
    monkeypatch.setattr(diagnosis, "find_spec", lambda name: name if name in installed else None)
    lacking = "not installed: rapidocr, onnxruntime"
    assert reward("ocr") == Finding("reward ocr", "missing", lacking, "pip install 'solrl[ocr]'")
    installed.update(("rapidocr", "onnxruntime"))
    assert reward("ocr") == Finding("reward ocr", "ok", "in solrl_core.rewards.ocr")


def test_a_device_or_a_precision_that_is_not_there_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rows = {finding.subject: finding for finding in diagnosis.machine("cuda:1", "fp8")}
    assert rows["device"].state == rows["precision"].state == "missing"
    assert rows["precision fp8"].state == "n/a"
    assert rows["precision"].action == "use one of nvfp4, bf16"
    rows = {finding.subject: finding for finding in diagnosis.machine()}
    assert rows["device"].state == "warn"
    assert "missing" not in {finding.state for finding in rows.values()}


def test_an_emulation_on_a_gpu_is_warned_of_and_a_native_precision_is_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    native = PrecisionSupport("native", "on tensor cores")
    monkeypatch.setattr("solrl_core.precision.support.probe", lambda precision, device: native)
    rows = {finding.subject: finding for finding in diagnosis.machine("cpu")}
    assert rows["precision fp8"] == Finding("precision fp8", "ok", "native: on tensor cores")
    emulated = PrecisionSupport("emulated", "rounded to NVFP4, multiplied in float32")
    monkeypatch.setattr("solrl_core.precision.support.probe", lambda precision, device: emulated)
    monkeypatch.setattr("solrl_core.precision.support.supported_precisions", lambda device: ("nvfp4",))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    row = {finding.subject: finding for finding in diagnosis.machine("auto", "nvfp4")}["precision"]
    assert (row.state, row.text) == ("warn", "nvfp4 is emulated on this GPU, slower than bf16")


def test_unsupported_precisions_are_shown_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str | None:
        raise ValueError("Transformer Engine is broken: OSError: libcublasLt.so.13: undefined symbol")

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("solrl_core.precision.te.engine_version", broken)
    rows = {finding.subject: finding for finding in diagnosis.machine()}
    assert rows["precision nvfp4"].text.endswith("only a Blackwell GPU has NVFP4 units, this is CPU")
    assert rows["precision fp8"].state == "n/a"
    assert rows["precision fp8"].text == "not on this device: it takes an Ada, Hopper or Blackwell GPU"
    assert rows["precision bf16"].text == "emulated: bfloat16 weights, float32 arithmetic"
    assert rows["transformer engine"].state == "warn"
    assert "undefined symbol" in rows["transformer engine"].text
    assert "until then nvfp4 is emulated" in rows["transformer engine"].action
