"""docs/settings.md: every setting of a run and of the services, with a meaning."""

import re
from functools import reduce
from importlib.resources import files
from operator import getitem

import yaml
from settings_page import page, settings_of
from solrl_reward.settings import RewardSettings
from solrl_rollout.settings import RolloutSettings
from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.defaults import DEFAULT_PRESET, FIRST_SETTINGS
from solrl_trainer.settings.presets import resolve
from solrl_trainer.settings.settings_yaml import sourced_yaml
from tests.docs.fences import ROOT


def test_the_page_is_generated() -> None:
    published = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert published == page(), "python scripts/settings_page.py > docs/settings.md"


def test_every_setting_is_described() -> None:
    rows = [*settings_of(RunConfig), *settings_of(RolloutSettings), *settings_of(RewardSettings)]
    assert {"explore.candidates", "optimizer.shard_base", "queue_limit", "batch"} <= {row.name for row in rows}
    assert all(row.meaning.endswith(".") for row in rows), [row.name for row in rows if not row.meaning.endswith(".")]


def test_a_run_has_few_settings_and_the_page_and_a_dry_run_begin_with_those_to_know() -> None:
    sections, _, algorithms = (ROOT / "docs" / "settings.md").read_text("utf-8").partition("### With `algorithm.name=")
    names = re.findall(r"^\| `([\w.]+)` \|", sections, re.M)
    own = re.findall(r"^\| `([\w.]+)` \|", algorithms.partition("### When a run is resumed")[0], re.M)
    assert len(names) == len(set(names))
    assert len({*names, *own}) <= 95
    assert tuple(names[: len(FIRST_SETTINGS)]) == FIRST_SETTINGS
    printed = [line.removeprefix("# ").partition(":")[0] for line in sourced_yaml(resolve(DEFAULT_PRESET))]
    assert tuple(printed[: len(FIRST_SETTINGS)]) == FIRST_SETTINGS
    assert set(names) <= set(printed)


def test_the_guide_names_existing_settings_to_users_of_flow_grpo() -> None:
    guide = (ROOT / "docs/flow-grpo.md").read_text(encoding="utf-8")
    table = guide.partition("| flow_grpo | here |")[2].partition("\n\n")[0]
    named = re.findall(r"`([\w.]+)`", " ".join(row.split("|")[2] for row in table.splitlines()[2:]))
    assert len(named) > 30
    fields = type(resolve("sd3-medium/flowgrpo_fast/pickscore").config.algorithm).model_fields
    assert set(named) <= {row.name for row in settings_of(RunConfig)} | {f"algorithm.{name}" for name in fields}


def test_the_page_on_algorithms_has_every_setting_of_fast() -> None:
    text = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
    section = text.partition("\n## `fast`, exactly\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (?:\d )?`([\w.]+)`[^|]*\|([^|]*)\|([^|]*)\|[^|]*\|$", section, re.M)
    for column, recipe in ((1, "fast"), (2, "sol_rl")):
        config = resolve(f"flux1/{recipe}/imagereward").config.model_dump()
        said = {row[0]: row[column].strip() for row in rows if row[column].strip()}
        assert said == {name: f"{reduce(getitem, name.split('.'), config):.7g}" for name in said}
        assert recipe != "fast" or len(said) == len(rows)
    stored = yaml.safe_load((files("solrl_trainer") / "settings/recipes/fast.yaml").read_text(encoding="utf-8"))
    parts = {name: part for name, part in stored["settings"].items() if isinstance(part, dict) and name != "evaluate"}
    assert {f"{name}.{key}" for name, part in parts.items() for key in part} <= {row[0] for row in rows}
