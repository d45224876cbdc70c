"""`solrl-train evaluate`: a run's averaged weights against its base, by any set of rewards."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from solrl_core.families import load_backbone
from solrl_core.generator import Generator
from solrl_core.rewards import RewardSet

from solrl_trainer import checkpoints
from solrl_trainer.config import RunConfig
from solrl_trainer.evaluate import Evaluation, compare, evaluate, verdicts
from solrl_trainer.gallery import load_gallery, save_gallery
from solrl_trainer.grid import write_grid
from solrl_trainer.prompts import find_prompts, read_prompts
from solrl_trainer.session import pick_device


def judge(
    folder: Path,
    note: Callable[[str], None],
    *,
    rewards: Sequence[str] = (),
    prompts: int | None = None,
    seeds: int | None = None,
    steps: int | None = None,
) -> dict[str, Any]:
    """Evaluate the newest checkpoint of a run; writes evaluation/{evaluation.json, grid.png} into its folder.

    Args:
        folder: a run's folder.
        note: told what is worth a line.
        rewards: judged by these; by default those of the run.
        prompts, seeds, steps: instead of the run's own settings; seeds are images a prompt.

    Returns:
        What evaluation.json holds.

    Raises:
        FileNotFoundError: the folder holds no run, or one without a checkpoint.
        ValueError, OSError: model, reward or prompts cannot be loaded.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no run (no config.json); name the --output of a `solrl-train run`")
    config = RunConfig.model_validate_json(path.read_text())
    found = checkpoints.latest(folder / "checkpoints", config)
    if found is None:
        raise FileNotFoundError(f"{folder} holds no checkpoint yet; one is written after an iteration")
    settings = config.evaluate
    held_out = read_prompts(find_prompts(config.prompts), "test")[: prompts or settings.prompts]

    note(f"loading {config.model}")
    backbone = load_backbone(config.model, device=pick_device(config.device), revision=config.revision)
    names = list(rewards) or [*config.rewards, *settings.rewards]
    options = {name: value for name, value in config.reward_options.items() if name in names}
    judges = RewardSet.load(names, backbone, options)
    generator = Generator(backbone, "bf16")

    def look(name: str) -> Evaluation:
        result = evaluate(
            generator,
            judges,
            held_out,
            seeds=seeds or settings.seeds,
            steps=steps or settings.steps,
            solver=config.solver,
            guidance=config.guidance,
        )
        note(f"{name}: " + ", ".join(f"{reward} {result.mean(reward):.4f}" for reward in result.scores))
        return result

    before = look("base")
    generator.set_adapter(found.averaged)
    after = look(f"version {found.version}")
    summary = {
        "model": config.model,
        "run": config.run,
        "version": found.version,
        "prompts": len(held_out),
        "seeds": seeds or settings.seeds,
        "steps": steps or settings.steps,
        "rewards": compare(before, after),
    }
    output = folder / "evaluation"
    output.mkdir(exist_ok=True)
    (output / "evaluation.json").write_text(json.dumps(summary, indent=1, allow_nan=False))
    save_gallery(
        output,
        prompts=[prompt.text for prompt in held_out],
        before=before.images,
        after=after.images,
        marks=verdicts(before, after),
        pairs=[],
        explored=None,
        regenerated=None,
    )
    write_grid(load_gallery(output), output / "grid.png")
    return summary
