"""The table of docs/checkpoints.md says how ComfyUI generates as the presets train."""

import re

import pytest
from solrl_core.families.original_layers import ORIGINAL_LAYERS
from solrl_trainer.settings.presets import resolve
from tests.docs.fences import ROOT

PAGE = (ROOT / "docs/checkpoints.md").read_text(encoding="utf-8")
COMMANDS = "".join((ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/24-gb.md")).replace(
    "\\\n", ""
)
TABLE = PAGE.partition("### Settings to draw with in ComfyUI")[2]
ROWS = re.findall(r"^\| [^`|]+ \| (`.*?`) \| \d[^|]* \| `(\w+)` \| (.*)\| (.*) \| (\d+) \|$", TABLE, re.MULTILINE)


@pytest.mark.parametrize(("presets", "sampler", "by_readme", "guidance", "steps"), ROWS)
def test_samplers_guidance_and_steps_are_those_of_the_presets(
    presets: str, sampler: str, by_readme: str, guidance: str, steps: str
) -> None:
    for preset in re.findall(r"[\w-]+", presets):
        config = resolve(f"{preset}/sol_rl/clipscore").config
        assert sampler == {"dpm2": "dpmpp_2m"}.get(config.solver, config.solver), preset
        assert float(guidance.split()[-1]) == config.guidance, preset
        assert int(steps) == config.evaluate.steps, preset
        typed = re.findall(rf"run --preset {preset}/.*? --set guidance=([\d.]+)", COMMANDS)
        assert set(typed) == set(re.findall(r"` ([\d.]+)", by_readme)[:1]), preset


def test_every_family_that_has_a_layout_is_in_the_table() -> None:
    families = {"flux1": "flux", "sd3-medium": "sd3", "wan-14b": "wan"}
    listed = {preset for presets, *_ in ROWS for preset in re.findall(r"[\w-]+", presets)}
    assert {families.get(preset, preset) for preset in listed} == {*ORIGINAL_LAYERS, "sana"}
