"""Registries: one rule for built-in names, entry points, paths to import, options and typing errors."""

import json
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from solrl_core.families.load import FAMILIES, MODELS, locate
from solrl_core.families.sd3 import StableDiffusion3
from solrl_core.registry import FolderRegistry, Registry
from solrl_core.reward_registry import REWARDS
from solrl_trainer.prompts.prompt_sets import PROMPTS

GROUP = "solrl.test_things"
Register = Callable[..., None]


@pytest.fixture
def register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Register:
    """Installs entry points of a group: name=value."""

    def install(group: str = GROUP, **entries: str) -> None:
        info = tmp_path / "other-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
        lines = [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
        (info / "entry_points.txt").write_text("\n".join(lines))
        monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    return install


def things(**options: Any) -> Registry[Any]:
    built_in = {"dumps": "json:dumps", "decimal": "decimal:Decimal"}
    return Registry("thing", GROUP, built_in, **options)


def test_built_in_names_entry_points_and_paths_are_found(register: Register) -> None:
    register(loads="json:loads", dumps="json:loads")
    registry = things()
    assert registry.names() == ["decimal", "dumps", "loads"]
    assert registry.find("dumps") is json.dumps  # built in goes first
    assert registry.find("loads") is json.loads
    assert registry.find("json:load") is json.load
    assert "loads" in registry
    assert "json:load" not in registry


@pytest.mark.parametrize("name", ["dump", "no such thing", "", "json", "json:", "json.py:x"])
def test_an_unknown_name_is_refused_before_any_import(name: str) -> None:
    hint = r" \(did you mean 'dumps'\?\)" if name == "dump" else ""
    text = rf"^got thing '{name}'{hint}; expected one of \['decimal', 'dumps'\], or package\.module:attribute$"
    with pytest.raises(ValueError, match=text):
        things().check(name)
    with pytest.raises(ValueError, match=text):
        things().find(name)


@pytest.mark.parametrize("value", ["no_such_package:thing", "json:no_such_name"])
def test_what_cannot_be_imported_names_the_entry(register: Register, value: str) -> None:
    register(broken=value)
    things().check("broken")
    with pytest.raises(ValueError, match=rf"^cannot load thing 'broken' \({value}, .* {GROUP}\): .*no_such"):
        things().find("broken")
    with pytest.raises(ValueError, match=rf"^cannot load thing '{value}': .*no_such"):
        things().find(value)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which is not on the import path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    for name in ("my_things", "my_more", "json"):
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name))
    del sys.modules["my_things"], sys.modules["my_more"]
    return tmp_path


def test_modules_of_the_current_folder_are_found_or_told_with_the_places(here: Path) -> None:
    (here / "my_things.py").write_text("def thing():\n    from my_more import more\n    return more\n")
    (here / "my_more.py").write_text("more = 7\n")
    (here / "json.py").write_text("dumps = None\n")
    assert things().find("my_things:thing")() == 7
    assert things().find("json:dumps") is json.dumps  # what is installed goes first
    del sys.modules["my_things"]
    (here / "my_things.py").write_text("import my_moer\ndef thing(): pass\n")
    path = list(sys.path)
    text = rf"no module 'my_thing' \(did you mean 'my_things'\?\).*PYTHONPATH, or in the current folder {here}"
    with pytest.raises(ValueError, match=text):
        things().find("my_thing:thing")
    assert sys.path == path
    with pytest.raises(ValueError, match="No module named 'my_moer'"):
        things().find("my_things:thing")
    (here / "my_things.py").write_text("def thing(): pass\n")
    with pytest.raises(ValueError, match=r"my_things has no attribute 'thin' \(did you mean 'thing'\?\)"):
        things().find("my_things:thin")


def test_wrong_kinds_and_options_name_the_entry(register: Register) -> None:
    register(version="sys:version_info")
    registry = things(wrong=lambda found: None if callable(found) else "a function")
    with pytest.raises(ValueError, match=r"^thing 'version' \(sys:version_info, .*\) is .*; expected a fun"):
        registry.find("version")
    with pytest.raises(ValueError, match=r"^thing 'sys:maxsize' is \d+; expected a function"):
        registry.find("sys:maxsize")
    assert things().make("decimal", {"value": "1.5"}) == Decimal("1.5")
    assert things().make("dumps", {}) is json.dumps
    with pytest.raises(ValueError, match=r"got options \['indent'\] for thing 'dumps', a function; .*class whose"):
        things().make("dumps", {"indent": 1})
    with pytest.raises(ValueError, match=r"got option 'valeu' of thing 'decimal' \(did you mean 'value'\?\); expected"):
        things().make("decimal", {"valeu": "1"})
    with pytest.raises(ValueError, match=r"got 'no' for option 'line' of reward 'ocr'; expected true or false"):
        REWARDS.check_options("ocr", {"line": "no"})
    for reward, option in (("motion", "enough"), ("geneval", "threshold"), ("pickscore", "batch_size")):
        REWARDS.check_options(reward, {option: 1})
        with pytest.raises(ValueError, match=f"got True for option '{option}' of reward '{reward}'; expected a number"):
            REWARDS.check_options(reward, {option: True})
    registry = things(others=("nothing else",))
    with pytest.raises(ValueError, match=r"expected one of \[.*\], or nothing else$"):
        registry.find("json:loads")


def test_folders_are_found_by_function_or_stand_for_themselves(register: Register, tmp_path: Path) -> None:
    register(here="os:getcwd")
    folders = FolderRegistry("folder", GROUP, others=("package.module:attribute", "a folder"))
    assert folders.locate("here") == folders.locate("os:getcwd") == str(Path.cwd())
    assert folders.locate(str(tmp_path)) == str(tmp_path)
    with pytest.raises(ValueError, match=r"got folder 'her' .*'here'.*; expected one of .*attribute, or a folder$"):
        folders.locate("her")


def test_a_folder_with_a_registered_name_is_said_and_found_by_its_path(
    register: Register, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    register(my_set="os:getcwd")
    (tmp_path / "my_set").mkdir()
    monkeypatch.chdir(tmp_path)
    folders = FolderRegistry("folder", GROUP)
    assert [folders.locate("./my_set"), *caplog.messages] == ["./my_set"]
    assert [folders.locate("my_set") for _ in range(2)] == [str(tmp_path)] * 2
    assert [text.partition(";")[2] for text in caplog.messages] == [" for that, write ./my_set"]


def test_the_projects_own_registries() -> None:
    assert {"mini-flux", "mini-sana", "mini-sd3", "mini-text", "mini-wan"} <= set(MODELS.names())
    assert PROMPTS.names() == ["moving", "shapes", "words"]
    assert {"clipscore", "judge", "verifier", "vlm_judge"} <= set(REWARDS.names())
    for registry in (REWARDS, FAMILIES):
        assert all(registry.find(name) for name in registry.names())
    with pytest.raises(ValueError, match=r"got model 'mini-sna' \(did you mean 'mini-sana'\?\)"):
        locate("mini-sna")
    assert locate("some/hub-id") == "some/hub-id"


def test_a_family_of_an_entry_point_is_found_by_its_pipeline(register: Register) -> None:
    register("solrl.families", AuraFlowPipeline="solrl_core.families.sd3:StableDiffusion3")
    assert FAMILIES.find("AuraFlowPipeline") is StableDiffusion3
    assert "AuraFlowPipeline" in FAMILIES.names()
    with pytest.raises(ValueError, match="KolorsPipeline"):
        FAMILIES.find("KolorsPipeline")
    # A downloaded model cannot choose what is imported.
    with pytest.raises(ValueError, match="expected one of"):
        FAMILIES.find("solrl_core.families.sd3:StableDiffusion3")


@pytest.mark.parametrize("value", ["no_such_package:Family", "json:no_such_name", "json:dumps", "json:JSONDecoder"])
def test_a_family_that_is_none_is_refused(register: Register, value: str) -> None:
    register("solrl.families", AuraFlowPipeline=value)
    with pytest.raises(ValueError, match=rf"family 'AuraFlowPipeline' \({value}, entry point of solrl.families\)"):
        FAMILIES.find("AuraFlowPipeline")
