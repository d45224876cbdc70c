"""The exploration plan that ships with mini-sana, which the demo uses: `python benchmarks/demo_plan.py`.

Fits four steps to the recipe's trajectories on training prompts, as `solrl-train calibrate` does, at the noise levels
that plan_fidelity.py chose for this model. Writes plan.json next to the model's weights. Fit again after training them.
"""

import json
from pathlib import Path

from solrl_core.families.load import load_backbone
from solrl_core.sampling.fitting import fit
from solrl_core.sampling.generator import Generator
from solrl_trainer.calibration.fitting import recipe_examples
from solrl_trainer.commands.demo import PRESET, plan_file
from solrl_trainer.settings.presets import resolve

FIDELITY = Path("docs/results/plan_fidelity.json")


def main() -> None:
    """Fit and write the plan."""
    config = resolve(PRESET).config
    sigmas = json.loads(FIDELITY.read_text())["solvers"][config.model]["sigmas"]
    generator = Generator(load_backbone(config.model, device="cpu"), "bf16")
    fitted = fit(generator, recipe_examples(config, generator), sigmas)
    plan = {
        "steps": len(sigmas),
        "fitted": fitted.model_dump(mode="json"),
        "calibrated_for": fitted.fitted_for.model_dump(mode="json"),
    }
    path = plan_file()
    path.write_text(json.dumps({"explore": plan}, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
