"""The exploration plan that ships with mini-sana, which the demo of shapes uses: `python benchmarks/demo_plan.py`.

Fits four steps to the recipe's trajectories on training prompts, without the refining of `solrl-train calibrate`: the
stored figures of the demo are of a plan that is not refined. Writes plan.json next to the model's weights. Fit again
after training them.
"""

import json

from solrl_core.families.load import load_backbone
from solrl_core.sampling.fitting import fit
from solrl_core.sampling.generator import Generator
from solrl_trainer.calibration.plans import recipe_examples
from solrl_trainer.commands.demo import SHAPES, plan_file
from solrl_trainer.settings.presets import resolve

SIGMAS = (1.0, 0.85, 0.7, 0.4)
"""The schedule that plan_fidelity.py chose for this model among those that are not refined."""


def main() -> None:
    config = resolve(SHAPES.preset).config
    generator = Generator(load_backbone(config.model, device="cpu"), "bf16")
    fitted = fit(generator, recipe_examples(config, generator), SIGMAS, rounds=0)
    plan = {
        "steps": len(SIGMAS),
        "fitted": fitted.model_dump(mode="json"),
        "calibrated_for": fitted.fitted_for.model_dump(mode="json"),
    }
    path = plan_file()
    path.write_text(json.dumps({"explore": plan}, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
