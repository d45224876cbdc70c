"""The card of a model, whose code gives the image that the evaluation made."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from solrl_core.adapter import encode_for_diffusers
from solrl_core.families import load_backbone
from solrl_core.rewards.images import as_pil
from solrl_core.sampling.generator import Generator
from solrl_proto.noise import expand_seeds
from solrl_trainer.prompts.prompt_sets import prompts_of_run
from solrl_trainer.report.model_card import LORA, HeldOutFigures, held_out, how_to_load, model_card
from solrl_trainer.report.page import write_report
from solrl_trainer.run_folder.folder import saved_settings
from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.presets import ConfigError, resolve
from tests.core.lora_helpers import random_adapter
from tests.trainer.run_folders import HOSTILE, RESULT, finished_run


def front_of(card: str) -> dict[str, object]:
    content = yaml.safe_load(card.split("---\n")[1])
    assert isinstance(content, dict)
    return content


def test_figures_are_those_of_the_version(tmp_path: Path) -> None:
    finished_run(tmp_path)
    result = held_out(tmp_path, 30)
    assert (result.rewards, result.prompts, result.images) == (RESULT["rewards"], 128, 512)
    assert held_out(tmp_path, 20) is None
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"event": "evaluation", "version": 20, "rewards": {"clipscore": 0.25}}) + "\n")
    means = held_out(tmp_path, 20)
    assert means.rewards == {"clipscore": {"before": 0.2412, "after": 0.25}}
    (tmp_path / "evaluation").mkdir()
    evaluated = {"version": 20, "prompts": 8, "seeds": 2, "rewards": RESULT["rewards"]}
    (tmp_path / "evaluation" / "evaluation.json").write_text(json.dumps(evaluated))
    later = held_out(tmp_path, 20)
    assert (later.rewards, later.images) == (RESULT["rewards"], 16)


def test_the_card_says_whether_there_are_figures(tmp_path: Path) -> None:
    config = saved_settings(finished_run(tmp_path))
    whole = model_card(config, 30, held_out(tmp_path, 30), "here")
    assert "| clipscore | trained | 0.2412 | 0.2731 | +0.0319 [+0.0281, +0.0357] |" in whole
    assert "Means over 512 images of 128 held-out prompts" in whole
    half = model_card(config, 20, None, "here")
    assert "after\n20 of 30 iterations" in half
    assert "This version was not evaluated" in half
    assert "| clipscore |" not in half
    assert "solrl" in str(front_of(half)["tags"])
    assert "base_model" not in front_of(half), "a registered name is no repository of the hub"


def test_a_card_has_its_base_its_pipelines_call_and_its_layout(tmp_path: Path) -> None:
    config = resolve("flux1/sol_rl/imagereward", overrides=["revision=abc", "guidance=3.5"]).config
    card = model_card(config, 1, None, "me/flux")
    assert front_of(card)["base_model"] == "black-forest-labs/FLUX.1-dev"
    assert "from_pretrained('black-forest-labs/FLUX.1-dev', revision='abc', dtype" in card
    assert "num_inference_steps=28, guidance_scale=3.5)" in card
    assert "the model was not on the machine" in card
    config = resolve("mini-flux/sol_rl/clipscore").config
    assert "guidance_scale=1.0, height=64, width=64, max_sequence_length=16)" in model_card(config, 1, None, "here")
    config = resolve("mini-sana/sol_rl/clipscore").config
    card = model_card(config, 1, None, "here")
    assert "complex_human_instruction=None, use_resolution_binning=False, sigmas=[1.0, 0.9, " in card
    config = resolve("mini-sd3/sol_rl/clipscore", overrides=["lora.rank=8", "lora.alpha=12"]).config
    card = model_card(config, 1, None, "here")
    assert "`transformer.<module>.lora_A.weight` [rank, in]" in card
    assert "multiplied by alpha / rank = 1.5" in card


def test_the_card_s_prompt_and_seed_are_those_of_the_first_held_out_image(tmp_path: Path) -> None:
    config = saved_settings(finished_run(tmp_path))
    assert repr(HOSTILE) in model_card(config, 30, None, "here")
    card = model_card(config, 30, None, "here")
    assert "manual_seed(4700000001)" in card
    assert "Prompt and seed are the first held-out image's." in card
    titles = re.findall(r'<img [^>]*title="([^"]*)"', write_report(tmp_path).read_text(encoding="utf-8"))
    assert titles[:2] == ["before, seed 4700000001", "after, seed 4700000001"]
    nowhere = config.model_copy(update={"output": tmp_path / "x", "prompts": "nowhere"})
    card = model_card(nowhere, 30, None, "here")
    assert "prompt='a prompt of yours'" in card
    assert "first held-out image" not in card


def test_the_card_names_no_address_or_path(tmp_path: Path) -> None:
    model = tmp_path / "secret" / "my-model"
    model.mkdir(parents=True)
    private = {"rollout_url": "http://secret:8100", "output": tmp_path / "secret" / "run"}
    settings = [f"prompts={tmp_path}/secret/my-prompts", "reward_options={clipscore: {at: 'http://secret'}}"]
    config = resolve("sana/sol_rl/clipscore", overrides=[*settings, f"model={model}"], arguments=private).config
    card = model_card(config, 1, None, "me/sana")
    assert "secret" not in card
    assert "path/to/my-model" in card
    given = yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])
    assert (given["prompts"], given["model"], given["explore"]["candidates"]) == ("./my-prompts", "my-model", 96)


def test_nothing_of_the_settings_breaks_out_of_the_card(tmp_path: Path) -> None:
    folder = finished_run(tmp_path)
    settings = json.loads((folder / "config.json").read_text())
    targets = "to_q\n```\n\n# Broken\n````\n"
    settings |= {"rewards": {"own:a|b\n# Broken": 1.0, "clipscore": 0.0}}
    settings["lora"]["targets"] = targets
    config = RunConfig.model_validate(settings)
    card = model_card(config, 1, HeldOutFigures({"own:a|b\n# Broken": {"before": 0.0, "after": 1.0}}), "here")
    text, yaml_block = re.split(r"`{5}yaml\n", card)
    assert yaml.safe_load(yaml_block.removesuffix("`````\n"))["lora"]["targets"] == targets
    assert "\n# Broken" not in text.partition("# made-up")[2]
    assert r"| own:a\|b\n# Broken | trained | 0.0000 | 1.0000 | – |" in text
    settings["preset"] = "a/b|\n\n# Broken/c"
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=r"setting preset \(from .*config.json\): got .*; expected <model>/<recipe>/"):
        saved_settings(folder)


STEPS = 4


def pixels(image: Image.Image) -> torch.Tensor:
    return torch.tensor(list(image.getdata())).float()


@pytest.mark.parametrize("solver", ["euler", "dpm2"])
@pytest.mark.parametrize("model", ["mini-sana", "mini-sd3", "mini-flux"])
def test_the_card_s_code_makes_the_image_of_the_evaluation(model: str, solver: str, tmp_path: Path) -> None:
    settings = [f"solver={solver}", f"evaluate.steps={STEPS}", "lora.rank=4", "lora.alpha=8"]
    config = resolve(f"{model}/sol_rl/clipscore", overrides=settings, arguments={"output": tmp_path}).config
    backbone = load_backbone(model, dtype=torch.float32)
    generator = Generator(backbone, "bf16")
    adapter = random_adapter(backbone, 1, 1 / 16, config.lora.rank, config.lora.alpha)
    first = prompts_of_run(config.prompt_sources, "test").all[0]
    (seed,) = expand_seeds(0, first.id, 1)

    def image(solver: str) -> torch.Tensor:
        made = generator.generate(first.text, [seed], steps=STEPS, solver=solver, guidance=config.guidance).images
        return pixels(as_pil(made)[0])

    base = image(solver)
    generator.set_adapter(adapter)
    (tmp_path / LORA).write_bytes(encode_for_diffusers(adapter))
    (tmp_path / "README.md").write_text(model_card(config, 1, None, str(tmp_path)))
    code = how_to_load(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(code.replace("torch.bfloat16", "torch.float32"), "README.md", "exec"), names)
    theirs = pixels(names["image"])
    # In levels of 255. The evaluation merges the LoRA and rounds the weights to BF16.
    assert float((theirs - image(solver)).abs().max()) <= 6
    other = "euler" if solver == "dpm2" else "dpm2"
    assert float((theirs - image(other)).abs().max()) > 12
    assert float((theirs - base).abs().max()) > 20
