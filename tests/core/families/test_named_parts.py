"""What a model's model_index.json and configurations may name: no other library, no nested model, no absurd size."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from solrl_core import diagnosis
from solrl_core.families import load_backbone
from solrl_core.families.load import describe_model
from solrl_core.families.skeleton import load_skeleton
from solrl_core.memory_plan import plan_memory
from tests.core.families.tiny_pipelines import write_flux

LOADERS: tuple[Callable[[str], Any], ...] = (load_skeleton, load_backbone, diagnosis.model)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_flux(tmp_path / "flux", dev=True)


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.fixture
def refused(folder: Path) -> Callable[[str], None]:
    """Checks that all loaders refuse the folder with these words."""

    def check(words: str) -> None:
        for load in LOADERS:
            try:
                said = load(str(folder))
                assert isinstance(said, diagnosis.Finding)
                assert said.state == "missing"
            except OSError as error:
                said = error
            assert re.search(words, str(said)), (load, said)

    return check


@pytest.mark.parametrize("part", [["evil", "Evil"], {"evil": 1, "Evil": 2}])
@pytest.mark.parametrize("name", ["extra", "transformer"])
def test_no_other_library_is_imported(
    folder: Path, refused: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, name: str, part: Any
) -> None:
    (folder.parent / "evil.py").write_text("Evil = None\n")
    monkeypatch.syspath_prepend(folder.parent)
    change(folder / "model_index.json", **{name: part})
    refused(f"model_index.json has the part {name} of 'evil', 'Evil'; expected a library of diffusers or transformers")
    with pytest.raises(ValueError, match=f"the part {name} of 'evil', 'Evil'"):
        describe_model(str(folder))
    assert "evil" not in sys.modules


@pytest.mark.parametrize("kind", ["DiffusionPipeline", "FlashPackDiffusionPipeline"])
def test_no_part_is_a_model_with_an_index_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    (folder.parent / "evil.py").write_text("Evil = None\n")
    monkeypatch.syspath_prepend(folder.parent)
    index = {"_class_name": "FluxPipeline", "transformer": ["evil", "Evil"]}
    (folder / "transformer" / "model_index.json").write_text(json.dumps(index))
    change(folder / "model_index.json", transformer=["diffusers", kind])
    for load in (load_skeleton, load_backbone):
        with pytest.raises(OSError, match=rf"names {kind} of diffusers .*; expected a subclass of ModelMixin"):
            load(str(folder))
    assert "evil" not in sys.modules


@pytest.mark.parametrize(
    ("file", "setting", "number", "most"),
    [
        ("transformer/config.json", "num_layers", 10**9, 1000),
        ("text_encoder_2/config.json", "num_layers", 1001, 1000),
        ("vae/config.json", "layers_per_block", 10**30, 1000),
        ("scheduler/scheduler_config.json", "num_train_timesteps", 10**9, 2**24),
    ],
)
def test_an_absurd_number_of_a_configuration_is_named(
    folder: Path, refused: Callable[[str], None], file: str, setting: str, number: int, most: int
) -> None:
    change(folder / file, **{setting: number})
    refused(rf"{file}: got {setting} = [\de+]+; expected at most {most}: get the file again")


def test_files_that_are_no_objects_are_named(folder: Path, refused: Callable[[str], None]) -> None:
    (folder / "transformer" / "config.json").write_text("[1]")
    refused(r"transformer/config\.json: got list; expected a JSON object")


def test_a_plan_says_that_configurations_do_not_fit_together(folder: Path) -> None:
    change(folder / "text_encoder" / "config.json", num_attention_heads=-4)
    with pytest.raises(ValueError, match=r"the configurations of flux do not fit together, a pass fails: .*; get them"):
        plan_memory(load_skeleton(str(folder)), ["bf16"], 1)
