"""A single-file checkpoint as the model of a service, of a run that uses it, and of the programs around them."""

from collections.abc import Callable
from pathlib import Path

import pytest
from solrl_core.families import load_backbone
from solrl_core.families.load import locate
from solrl_core.fingerprint import module_digest
from solrl_rollout.__main__ import main as rollout
from solrl_trainer.__main__ import main as trainer
from solrl_trainer.commands.run import run
from solrl_trainer.memory import training_memory
from solrl_trainer.records.status_reports import run_settings
from solrl_trainer.report.model_card import model_card
from solrl_trainer.settings.presets import resolve
from tests.core.families import original_files as original
from tests.support.service_helpers import running_service
from tests.support.typed import accepted
from tests.trainer.training_helpers import QUICK, run_config

PRESET = "mini-sd3/sol_rl/clipscore"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """mini-sd3's transformer in ComfyUI's layout, and the place of everything else."""
    weights = original.prefixed(original.sd3(original.read(Path(locate("mini-sd3")), "transformer")), original.COMFY)
    return f"{original.write(tmp_path_factory.mktemp('files') / 'sd3.5_mini.safetensors', weights)}+mini-sd3"


@pytest.mark.slow
def test_a_service_and_a_run_take_it_and_agree_with_the_folder(model: str, tmp_path: Path) -> None:
    with running_service(model=model) as service:
        (served,) = service.client.get("/v1/models").json()["models"]
        assert served["name"] == "sd3.5_mini"
        assert served["digests"]["transformer"] == module_digest(load_backbone("mini-sd3").transformer)
        config = run_config(PRESET, tmp_path / "run", *QUICK, f"model={model}", rollout_url=service.url)
        assert run(config)["iterations"] == 1


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (rollout, ["check", "MODEL", "--precision", "bf16", "--groups", "2", "--candidates", "8", "--true-steps", "6"]),
        (rollout, ["memory", "--model", "MODEL"]),
        (rollout, ["doctor", "--model", "MODEL", "--rewards", "clipscore"]),
        (trainer, ["memory", "--preset", PRESET, "--set", "model=MODEL"]),
    ],
)
def test_programs_take_it(
    model: str, program: Callable[[], None], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_memory, "_count", lambda *_: (7, 3))  # it compiles
    done = accepted(program, *(word.replace("MODEL", model) for word in words), COLUMNS="400")
    # A title is as wide as its table.
    assert program is trainer or "sd3.5_mini.safetensors" in done.stdout.replace("\n", "")


def test_reports_and_cards_name_the_file_and_load_what_is_known(model: str, tmp_path: Path) -> None:
    config = resolve(PRESET, overrides=[f"model={model}"]).config
    assert run_settings(config).values["model"] == "sd3.5_mini.safetensors"
    card = model_card(config, 1, None, "me/lora")
    assert model.rpartition("/")[0] not in card
    assert "LoRA weights for `sd3.5_mini.safetensors`" in card
    code = card.partition("```python\n")[2].partition("\npipeline.load_lora_weights")[0]
    names: dict[str, object] = {}
    exec(code.replace("path/to", model.rpartition("/")[0]), names)
    assert type(names["pipeline"]).__name__ == "StableDiffusion3Pipeline"
    # It loads the file's configuration at the revision.
    config = resolve(PRESET, overrides=[f"model={model}", "revision=abc"]).config
    card = model_card(config, 1, None, "me/lora")
    assert "config=locate('mini-sd3'), config_revision='abc', subfolder='transformer'" in card
    assert "from_pretrained(locate('mini-sd3'), revision='abc', transformer=transformer" in card
    # A card written without the rest uses no unknown transformer.
    (tmp_path / "own.safetensors").touch()
    config = resolve(PRESET, overrides=[f"model={tmp_path}/own.safetensors+nobody/absent"]).config
    card = model_card(config, 1, None, "me/lora")
    assert "transformer=transformer" not in card
    assert "The LoRA was trained for the transformer in `own.safetensors`, which this code does not load" in card
