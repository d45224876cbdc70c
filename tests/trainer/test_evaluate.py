"""`solrl-train evaluate` reproduces the figures of a finished run, and scores it with other rewards; `export`."""

import base64
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from diffusers import SanaTransformer2DModel
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from PIL import Image
from safetensors.torch import load_file
from solrl_core.families import load_backbone
from solrl_minis import catalog
from solrl_trainer.__main__ import main
from solrl_trainer.commands.evaluate import evaluate_run
from solrl_trainer.commands.run import run
from tests.services.reward_servers import serving
from tests.support.small_model import small_model
from tests.support.typed import accepted, refused, typed
from tests.trainer.training_helpers import QUICK, prompts_in, run_config

SMALL = (
    *(*QUICK, f"model={small_model()}"),
    *("evaluate.prompts=3", "evaluate.seeds=2", "evaluate.rewards=[verifier, verifier_graded, judge]"),
    "rewards={clipscore: 1, verifier_graded: 0.5}",
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "one"
    run(run_config("mini-sana/naive_scaling/clipscore", folder, *SMALL))
    return folder


def test_it_reproduces_the_runs_figures_and_the_trained_sum_has_its_row(finished: Path, notes: list[str]) -> None:
    shown: list[tuple[float, float]] = []
    summary = evaluate_run(finished, progress=lambda done, total: shown.append((done, total)))
    # 6 images each of the base and of the run, in one batch.
    assert shown == [(0, 2), (1, 2), (1, 2), (2, 2)]
    assert summary["rewards"] == json.loads((finished / "result.json").read_text())["rewards"]
    assert (summary["version"], summary["prompts"], summary["seeds"]) == (1, 3, 2)
    assert [note.split()[0] for note in notes] == ["held-out", "loading", "base:", "version"]
    assert "3 of 128 by digest; tag: counting 1 of 32, " in notes[0]
    assert json.loads((finished / "evaluation" / "evaluation.json").read_text()) == summary
    # The trained sum has its row.
    result = json.loads((finished / "result.json").read_text())
    assert result["trained"] == {"clipscore": 1.0, "verifier_graded": 0.5}
    assert (result["prompts"], result["images"]) == (3, 6)
    assert list(result["rewards"]) == ["weighted sum", "clipscore", "verifier_graded", "verifier", "judge"]
    whole, first, second = (result["rewards"][name] for name in ("weighted sum", "clipscore", "verifier_graded"))
    for figure in ("before", "after", "gain"):
        assert whole[figure] == pytest.approx(first[figure] + 0.5 * second[figure], abs=1e-6)
    assert whole["low"] <= whole["gain"] <= whole["high"]


def test_the_command_scores_with_other_rewards(finished: Path) -> None:
    asked = ("--rewards", "verifier_graded", "--prompts", "2", "--seeds", "1")
    done = accepted(main, "evaluate", str(finished), *asked)
    assert "mini-sana, naive_scaling, trained on clipscore + 0.5 × verifier_graded" in " ".join(done.stdout.split())
    assert "the intervals are over 2 prompts" in " ".join(done.stdout.split())
    rows = [line.split()[0] for line in done.stdout.partition("interval")[2].splitlines() if "[" in line]
    assert rows == ["verifier_graded"]
    with Image.open(finished / "evaluation" / "grid.png") as grid:
        assert grid.width > 400


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "contains no run"),
        (["RUN", "--prompts", "0"], "evaluate.prompts (from --prompts): got 0; "),
        (["RUN", "--checkpoint", "7"], "has no checkpoint of version 7; expected one of [1]"),
        (["RUN", "--rewards", "beauty"], "got reward 'beauty'; expected one of"),
        (["RUN", "--set", "solver=dpm2"], "got --set solver=…; an evaluation can only set reward_options"),
        (["RUN", "--set", "reward_options=3"], "setting reward_options (from --set): got 3"),
        (["RUN", "--set", "reward_options={hpsv2: {}}"], "got options for reward 'hpsv2'; expected some of"),
    ],
)
def test_invalid_arguments_are_refused(finished: Path, arguments: list[str], message: str) -> None:
    said = refused(main, "evaluate", *(str(finished) if value == "RUN" else value for value in arguments))
    last = said.splitlines()[-1]
    assert last.startswith("solrl-train: ")
    assert message in last


def test_a_reward_that_the_run_did_not_use_accepts_options(finished: Path) -> None:
    """PickScore's arithmetic with CLIPScore's weights: exp(scale)·cos / 26 instead of / 100."""
    options = f"reward_options={{pickscore: {{model: {catalog.WEIGHTS / 'mini-clip'}, batch_size: 1}}}}"
    accepted(main, "evaluate", str(finished), "--rewards", "clipscore", "pickscore", "--set", options)
    found = json.loads((finished / "evaluation" / "evaluation.json").read_text())["rewards"]
    for when in ("before", "after"):
        # One of them rounds images to bytes.
        assert found["pickscore"][when] * 26 == pytest.approx(found["clipscore"][when] * 100, rel=0.01)
    assert evaluate_run(finished, rewards=["pickscore"])["rewards"] != {"pickscore": found["pickscore"]}


def test_rewards_that_do_not_fit_are_omitted_or_refused(finished: Path, tmp_path: Path, notes: list[str]) -> None:
    folder = tmp_path / "own"
    shutil.copytree(finished, folder)
    prompts = prompts_in(tmp_path / "prompts")
    for file in (folder / "config.json", folder / "checkpoints" / "000001" / "config.json"):
        settings = json.loads(file.read_text())
        settings["prompts"] = str(prompts)
        file.write_text(json.dumps(settings))
    checksums = file.with_name("checksums.json")
    changed = "sha256:" + hashlib.sha256(file.read_bytes()).hexdigest()
    checksums.write_text(json.dumps(json.loads(checksums.read_text()) | {file.name: changed}))
    summary = evaluate_run(folder)
    assert set(summary["rewards"]) == {"clipscore"}
    assert sorted(note.partition(":")[0] for note in notes[:3]) == [
        "held-out images are not scored with judge",
        "held-out images are not scored with verifier",
        "held-out images are not scored with verifier_graded",
    ]
    with pytest.raises(ValueError, match=r"reward 'verifier' cannot be used with the test prompts.*metadata.include"):
        evaluate_run(folder, rewards=["verifier"])


def test_the_weights_of_an_interrupted_run_are_exported(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "interrupted"
    (folder / "checkpoints").mkdir(parents=True)
    shutil.copy(finished / "config.json", folder)
    assert "has no checkpoint yet" in refused(main, "export", str(folder))
    shutil.copytree(finished / "checkpoints" / "000001", folder / "checkpoints" / "000001")
    assert str(folder / "lora.safetensors") in accepted(main, "export", str(folder)).stdout
    assert (folder / "lora.safetensors").read_bytes() == (finished / "lora.safetensors").read_bytes()
    (folder / "checkpoints" / "000001" / "state.safetensors").write_bytes(b"")
    for command in ("export", "evaluate"):
        assert "000001 is damaged: state.safetensors" in refused(main, command, str(folder))
    assert typed(main, "export", str(tmp_path)).stderr.startswith(f"solrl-train: {tmp_path} contains no run")


def test_the_transformer_is_exported_merged(finished: Path, tmp_path: Path) -> None:
    done = accepted(main, "export", str(finished), "--output", str(tmp_path), "--merged")
    assert f"merged in: {tmp_path / 'transformer'}" in done.stdout
    merged = SanaTransformer2DModel.from_pretrained(tmp_path / "transformer", torch_dtype=torch.bfloat16).state_dict()
    base = load_backbone(small_model()).transformer.state_dict()
    lora, changed = load_file(tmp_path / "lora.safetensors"), 0
    for name, weight in base.items():
        module = f"transformer.{name.removesuffix('.weight')}"
        expected = weight.bfloat16()
        if f"{module}.lora_A.weight" in lora:
            change = lora[f"{module}.lora_B.weight"] @ lora[f"{module}.lora_A.weight"]
            expected, changed = (weight + change).bfloat16(), changed + int(change.any())
        torch.testing.assert_close(merged[name], expected, rtol=2**-8, atol=1e-7)
    assert changed


def test_an_export_has_a_card_and_keeps_a_readme_that_is_none(finished: Path, tmp_path: Path) -> None:
    accepted(main, "export", str(finished), "--output", str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "grid.png", "lora.safetensors"]
    said = refused(main, "export", str(finished), "--output", str(tmp_path / "new"), "--format", "comfyui")
    assert "the layout of comfyui has no names for the family sana; expected one of flux," in said
    assert not (tmp_path / "new").exists()
    # A README that is no card is kept.
    (tmp_path / "README.md").write_text("mine")
    said = refused(main, "export", str(finished), "--output", str(tmp_path))
    assert "is no model card of solrl; choose another --output" in said
    assert (tmp_path / "README.md").read_text() == "mine"


class FakeHub(FastAPI):
    """A hub that accepts one token: the routes by which huggingface_hub creates a repository and commits small files.

    Attributes:
        created: names of created repositories.
        files: path in the repository → committed content in base64.
    """

    def __init__(self, token: str) -> None:
        super().__init__()
        self.token = token
        self.created: list[str] = []
        self.files: dict[str, str] = {}
        self.add_api_route("/{path:path}", self._post, methods=["POST"])

    async def _post(self, path: str, request: Request) -> JSONResponse:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return JSONResponse({"error": "Invalid username or password."}, 401)
        return JSONResponse(self._answer(path, await request.body(), str(request.base_url)))

    def _answer(self, path: str, body: bytes, url: str) -> dict[str, Any]:
        if path == "api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.created.append(name)
            return {"url": f"{url}{name}", "name": name}
        if path == "api/validate-yaml":
            assert json.loads(body)["content"].startswith("---\n")
            return {"errors": [], "warnings": []}
        if path.endswith("/preupload/main"):
            files = [{"path": one["path"], "uploadMode": "regular"} for one in json.loads(body)["files"]]
            return {"files": [one | {"shouldIgnore": False, "oid": None} for one in files]}
        assert path.endswith("/commit/main"), path
        for line in map(json.loads, body.decode().splitlines()):
            if line["key"] == "file":
                self.files[line["value"]["path"]] = line["value"]["content"]
        return {"success": True, "commitOid": "0" * 40, "commitUrl": f"{url}{self.created[0]}/commit/{'0' * 40}"}


def test_weights_and_card_are_pushed_to_a_hub(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export = ("export", str(finished), "--output", str(tmp_path), "--push-to-hub")
    hub = FakeHub(token="hf_right")
    with serving(hub) as url:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        for name, token, message in (
            ("shapes", "hf_right", "got --push-to-hub 'shapes'; expected USER/NAME"),
            ("me/shapes", "", "needs a token of Hugging Face that may write: set HF_TOKEN"),
            ("me/shapes", "hf_wrong", "401 Unauthorized"),
        ):
            assert message in refused(main, *export, name, HF_TOKEN=token)
            assert hub.files == {}
        assert f"pushed: {url}/me/shapes" in accepted(main, *export, "me/shapes", HF_TOKEN="hf_right").stdout
        assert hub.created == ["me/shapes"]
        assert sorted(hub.files) == ["README.md", "grid.png", "lora.safetensors"]
        for name, content in hub.files.items():
            assert base64.b64decode(content) == (tmp_path / name).read_bytes(), name
    assert 'load_lora_weights("me/shapes", weight_name="lora.safetensors")' in (tmp_path / "README.md").read_text()
    # A lost hub leaves the files.
    (tmp_path / "lora.safetensors").unlink()
    said = refused(main, *export, "me/shapes", HF_TOKEN="hf_right")
    assert f"a hub that can be reached (HF_ENDPOINT, HF_HUB_OFFLINE). The files are in {tmp_path}" in said
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "unset the `HF_HUB_OFFLINE`" in typed(main, *export, "me/shapes", HF_TOKEN="hf_right").stderr
    assert (tmp_path / "lora.safetensors").is_file()
