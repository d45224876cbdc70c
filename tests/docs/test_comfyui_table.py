"""The table of docs/checkpoints.md says how ComfyUI generates as the presets train."""

import math
import re

import pytest
import torch
from solrl_core.families import load_backbone
from solrl_core.families.original_layers import ORIGINAL_LAYERS
from solrl_core.sampling.generator import Generator
from solrl_core.sampling.sampler import SolverSpec
from solrl_core.sampling.solvers import Dpm2
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


class InMinusLogSigma(Dpm2):
    """ComfyUI's `dpmpp_2m`: the same steps, extrapolated over −log σ. Source: its k_diffusion/sampling.py."""

    def step(
        self,
        x: torch.Tensor,
        sigma: float,
        sigma_next: float,
        velocity: torch.Tensor,
        noise: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        clean = towards = x - sigma * velocity
        if self.sigma is not None and sigma_next > 0:
            weight = math.log(sigma / sigma_next) / (2 * math.log(self.sigma / sigma))
            towards = clean + weight * (clean - self.history[-1])
        self.history, self.sigma = (clean,), sigma
        return sigma_next / sigma * x + (1 - sigma_next / sigma) * towards, None


def test_comfyui_s_nearest_sampler_differs_by_a_fifth_of_the_difference_to_euler() -> None:
    generator = Generator(load_backbone("mini-flux"), "bf16")

    def drawn(solver: SolverSpec) -> torch.Tensor:
        return generator.generate("a red circle", range(8), steps=28, solver=solver).images

    ours = drawn("dpm2")
    nearest, euler = ((drawn(solver) - ours).abs().mean().item() for solver in (InMinusLogSigma(), "euler"))
    assert 0.1 < nearest / euler < 0.3
    assert "`dpmpp_2m` is nearest to solrl's" in PAGE
