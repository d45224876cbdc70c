"""Loading a folder or a hub id: settings, dtypes, and errors that say what to do."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from diffusers import DiffusionPipeline
from huggingface_hub import errors
from solrl_core import diagnosis
from solrl_core.families import load_backbone
from solrl_core.families.load import FAMILIES
from solrl_core.model_options import read_options
from tests.core.families.tiny_pipelines import T5_TOKENS, write_flux


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_flux(tmp_path_factory.mktemp("loading") / "flux", dev=True)


@pytest.fixture
def own(folder: Path, tmp_path: Path) -> Path:
    """A copy of the folder to change."""
    return Path(shutil.copytree(folder, tmp_path / "flux"))


def settings(folder: Path, **changes: Any) -> str:
    path = folder / "solrl.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return str(folder)


def test_the_folder_overrides_the_familys_default_settings(own: Path) -> None:
    given = load_backbone(settings(own, keep=["single"]))
    assert (given.latent_shape, given.policy.keep) == ((4, 8, 12), ("single",))
    assert given.encode(["a"])["states"].shape[1] == T5_TOKENS
    (own / "solrl.json").unlink()
    default = load_backbone(str(own))
    assert (default.height, default.width, default.policy.keep) == (512, 512, (r"\.norm",))
    assert default.encode(["a"])["states"].shape[1] == 128
    assert (default.name, default.family) == ("flux", "flux")


def test_the_layers_of_the_papers_flux_are_the_familys_modulation_and_last_projection(own: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "precision.md").read_text()
    (paper,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    model = load_backbone(settings(own, **json.loads(paper)))
    more = set(model.policy.select(model.transformer)) - set(model.fp8_policy.select(model.transformer))
    assert {re.sub(r"\.\d+\.", ".", name) for name in more} == {
        *("transformer_blocks.norm1.linear", "transformer_blocks.norm1_context.linear"),
        *("single_transformer_blocks.norm.linear", "proj_out"),
    }


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ('{"height": 64}'.encode("utf-16"), "solrl.json:1: this is not UTF-8"),
        (b"[1]", "expected a JSON object with some of: height"),
        (b'{"hight": 64}', "expected a JSON object with some of: height"),
        (b'{"height": 64, "height": 32}', "solrl.json: the key 'height' is there twice"),
        (b'{"height": "64"}', "got height = '64'; expected a whole number from 0 to 1048576"),
        (b'{"frames": 1e30}', "got frames = 1e.30; expected a whole number"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_with_their_file(tmp_path: Path, content: bytes, fault: str) -> None:
    (tmp_path / "solrl.json").write_bytes(content)
    with pytest.raises(ValueError, match=rf"^{re.escape(str(tmp_path))}.*{fault}"):
        read_options(str(tmp_path))


@pytest.mark.parametrize("size", [{"height": 72}, {"width": 100}])
def test_a_size_that_does_not_fit_is_refused(own: Path, size: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="multiples of 16 px"):
        load_backbone(settings(own, **size))


def test_weights_are_rounded_to_bfloat16_unless_a_dtype_is_given(own: Path) -> None:
    fine = 1 + 2**-20
    pipeline = DiffusionPipeline.from_pretrained(own, dtype=torch.float32)
    pipeline.transformer.proj_out.bias.data.fill_(fine)
    pipeline.transformer.save_pretrained(own / "transformer")
    for dtype, value, held in [
        (None, 1.0, torch.float32),
        (torch.float32, fine, torch.float32),
        (torch.bfloat16, 1.0, torch.bfloat16),
    ]:
        backbone = load_backbone(str(own), dtype=dtype)
        bias = backbone.transformer.get_parameter("proj_out.bias")
        assert (bias[0].item(), bias.dtype, backbone.dtype) == (value, held, held)
        rows = backbone.encode(["a"])
        noise = torch.zeros(1, *backbone.latent_shape)
        with torch.no_grad():
            velocity = backbone.velocity(backbone.transformer, noise, torch.ones(1), rows)
        assert velocity.dtype == backbone.decode(velocity).dtype == torch.float32


@pytest.mark.parametrize(
    ("lost", "said", "fault"),
    [
        ("model_index.json", "expected a folder in diffusers format", "No such file"),
        *[
            (lost, f".*flux lacks {lost}; copy them there", f"it lacks {lost}")
            for lost in ("transformer/", "tokenizer/", "text_encoder_2/model.safetensors")
        ],
    ],
)
def test_missing_files_are_named_with_what_to_do(own: Path, lost: str, said: str, fault: str) -> None:
    assert diagnosis.model(str(own)).state == "ok"
    path = own / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(OSError, match=rf"cannot load '.*flux': {said}"):
        load_backbone(str(own))
    finding = diagnosis.model(str(own))
    assert (finding.state, finding.action) == ("missing", "give a complete diffusers folder")
    assert fault in finding.text


def test_another_pipeline_is_refused_with_the_choices(own: Path) -> None:
    index = json.loads((own / "model_index.json").read_text())
    (own / "model_index.json").write_text(json.dumps(index | {"_class_name": "KolorsPipeline"}))
    choices = re.escape(str(FAMILIES.names()))
    with pytest.raises(ValueError, match=f"got family 'KolorsPipeline'; expected one of {choices}, or a class"):
        load_backbone(str(own))


def hub_error(kind: type[errors.HfHubHTTPError]) -> errors.HfHubHTTPError:
    response = httpx.Response(403, request=httpx.Request("GET", "https://huggingface.co"))
    return kind("refused", response=response)  # type: ignore[arg-type, unused-ignore]


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        (hub_error(errors.GatedRepoError), "accept the terms at https://huggingface.co/some/model, and set HF_TOKEN"),
        (hub_error(errors.RepositoryNotFoundError), "check the id, or set HF_TOKEN"),
        (hub_error(errors.RevisionNotFoundError), "no such revision"),
        (errors.OfflineModeIsEnabled("offline"), "run `hf download some/model`"),
        (errors.LocalEntryNotFoundError("not in the cache"), "not in the local cache"),
        (RuntimeError("something else"), "for gated models set HF_TOKEN"),
    ],
)
def test_hub_errors_say_what_to_do(monkeypatch: pytest.MonkeyPatch, reason: Exception, advice: str) -> None:
    asked: list[dict[str, Any]] = []

    def refuse(where: str, **options: Any) -> None:
        asked.append({"where": where} | options)
        # As diffusers does: another error, raised while this one was handled.
        try:
            raise reason
        except Exception:
            raise OSError("cannot load the configuration")  # noqa: B904

    monkeypatch.setattr(DiffusionPipeline, "load_config", refuse)
    with pytest.raises(OSError, match="cannot load 'some/model'") as refused:
        load_backbone("some/model", revision="abc")
    assert advice in str(refused.value)
    assert asked == [{"where": "some/model", "revision": "abc"}]


def test_a_hub_model_is_loaded_from_its_snapshot_at_the_revision(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []
    config = DiffusionPipeline.load_config(folder)

    def download(where: str, **options: Any) -> str:
        asked.append((where, options))
        return str(folder)

    monkeypatch.setattr(DiffusionPipeline, "load_config", lambda where, **options: config)
    monkeypatch.setattr(DiffusionPipeline, "download", download)
    assert load_backbone("some/model", revision="abc").family == "flux"
    assert asked == [("some/model", {"revision": "abc"})]
