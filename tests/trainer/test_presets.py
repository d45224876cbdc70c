"""Presets: every name resolves, later layers win, errors name their source, and the paper's settings are there."""

import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from solrl_core.reward_registry import REWARDS
from solrl_rollout.settings import RolloutSettings
from solrl_trainer.__main__ import main
from solrl_trainer.algorithms.algorithm import AlgorithmSettings
from solrl_trainer.settings import presets
from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.defaults import DEFAULT_PRESET
from solrl_trainer.settings.presets import RECIPES, ConfigError, print_presets, resolve, resolve_again
from solrl_trainer.settings.settings_yaml import settings_yaml, sourced_yaml
from tests.support.typed import accepted, typed

PRESET = "mini-sana/sol_rl/clipscore"


def test_every_preset_resolves() -> None:
    parts = [*product(presets.MODELS, RECIPES, ["clipscore"]), *product(["mini-sana"], ["fast"], REWARDS.names())]
    for name in map("/".join, parts):
        config = resolve(name).config
        assert (config.preset, config.rewards) == (name, {name.rpartition("/")[2]: 1.0})
        assert RunConfig.model_validate_json(config.model_dump_json()) == config


def test_a_reward_of_another_package_ends_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[solrl.rewards]\nred_share = my_rewards:RedShare\n")
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    for reward, run in (("red_share", "mini-sana-fast-red_share"), ("my:RedShare", "mini-sana-fast-my-redshare")):
        config = resolve(f"mini-sana/fast/{reward}").config
        assert (config.rewards, config.run) == ({reward: 1}, run)
    print_presets()


OWN = "algorithm.name=tests.trainer.algorithms.test_algorithms:Weighted"


def test_an_algorithm_of_ones_own_takes_the_recipes_other_settings(caplog: pytest.LogCaptureFixture) -> None:
    preset = "mini-sana/fast/clipscore"
    config = resolve(preset, overrides=[OWN, "algorithm.temperature=2"]).config
    assert config.algorithm.model_dump().keys() == {*AlgorithmSettings.model_fields, "temperature"}
    assert config.explore.candidates == resolve(preset).config.explore.candidates == 24
    (message,) = caplog.messages
    dropped = "algorithm.beta, algorithm.beta_end, algorithm.beta_iterations, algorithm.kl_weight"
    assert message.startswith(f"recipe fast: {dropped} belong")
    assert "'algorithm.beta' from --set, which does not exist" in refusal(preset, overrides=[OWN, "algorithm.beta=1"])
    # DPO's beta is another quantity; dancegrpo inherits FlowGRPO's settings.
    assert resolve(preset, overrides=["algorithm.name=dpo"]).config.algorithm.beta == 2000  # type: ignore[attr-defined]
    kept = resolve("mini-sana/flowgrpo_fast/clipscore", overrides=["algorithm.name=dancegrpo"]).config.algorithm
    assert kept.window == RECIPES["flowgrpo_fast"].settings["algorithm.window"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("overrides", "run"),
    [
        ([], "mini-sana-sol_rl-clipscore"),
        (["rewards=hpsv2"], "mini-sana-sol_rl-hpsv2"),
        (["rewards={clipscore: 1, 'my.Rewards:red': 0.2, hpsv2: 0}"], "mini-sana-sol_rl-clipscore-my.rewards-red"),
        (["rewards={'a:" + "b" * 100 + "': 1}"], "mini-sana-sol_rl-a-" + "b" * 45),
        (["rewards=hpsv2", "run=mine"], "mine"),
    ],
)
def test_a_run_is_named_after_what_it_trains(overrides: list[str], run: str) -> None:
    config = resolve(PRESET, overrides=overrides).config
    assert (config.run, config.output) == (run, Path("runs", run))
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


def seeds_source(**layers: Any) -> tuple[int, str]:
    resolved = resolve(PRESET, **layers)
    return resolved.config.seed, resolved.sources["seed"]


def test_later_layers_win_and_files_may_be_nested_or_dotted() -> None:
    file, overrides, arguments = {"seed": 1}, ["seed=2"], {"seed": 3}
    assert seeds_source() == (42, "default")
    assert seeds_source(files={"file": file}) == (1, "file")
    assert seeds_source(files={"file": file}, overrides=overrides) == (2, "--set")
    assert seeds_source(files={"file": file}, overrides=overrides, arguments=arguments) == (3, "command line")
    assert seeds_source(arguments={"seed": None}, overrides=["seed=4", "seed=5"]) == (5, "--set")
    nested = resolve(PRESET, files={"file": {"explore": {"steps": 3, "keep": 8}, "iterations": 2}})
    assert nested == resolve(PRESET, files={"file": {"explore.steps": 3, "explore.keep": 8, "iterations": 2}})
    assert (nested.config.explore.steps, nested.config.explore.keep, nested.config.iterations) == (3, 8, 2)


def test_every_setting_has_a_source_and_a_file_wins_over_the_model() -> None:
    resolved = resolve(PRESET)
    assert resolved.sources["optimizer.learning_rate"] == "model mini-sana"
    assert resolved.sources["rewards"] == "reward clipscore"
    changed = resolve(PRESET, files={"file": {"optimizer": {"learning_rate": 5e-4}}})
    assert changed.config.optimizer.learning_rate == 5e-4
    assert changed.sources["optimizer.learning_rate"] == "file"
    # One key of a section does not change the others.
    assert changed.config.optimizer.updates == resolved.config.optimizer.updates
    dumped = resolved.config.model_dump()
    sections = {k: v for k, v in dumped.items() if isinstance(v, dict) and k not in ("rewards", "reward_options")}
    keys = {f"{k}.{inner}" for k, v in sections.items() for inner in v} | (dumped.keys() - sections.keys())
    assert resolved.sources.keys() == keys


def refusal(preset: str = PRESET, **layers: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        resolve(preset, **layers)
    return str(raised.value)


@pytest.mark.parametrize(
    ("preset", "said"),
    [
        ("mini-sana", ["'mini-sana'", "<model>/<recipe>/<reward>", PRESET]),
        ("mini-sama/sol_rl/clipscore", ["model 'mini-sama'", "did you mean 'mini-sana'?"]),
        ("mini-sana/sol-rl/clipscore", ["recipe 'sol-rl'", "did you mean 'sol_rl'?"]),
        ("mini-sana/sol_rl/clip", ["reward 'clip'", "clipscore"]),
        ("", ["<model>/<recipe>/<reward>"]),
    ],
)
def test_an_unknown_preset_is_refused_with_the_known_ones(preset: str, said: list[str]) -> None:
    message = refusal(preset)
    assert all(part in message for part in said), message


@pytest.mark.parametrize("key", ["explore.promts", "explore", "optimiser.learning_rate", "nonsense"])
@pytest.mark.parametrize("layer", ["overrides", "files"])
def test_an_unknown_setting_is_refused_with_its_name_and_source(key: str, layer: str) -> None:
    message = refusal(**{layer: [f"{key}=3"] if layer == "overrides" else {"a.yaml": {key: 3}}})
    assert f"setting {key!r} from {'--set' if layer == 'overrides' else 'a.yaml'}" in message
    assert ("explore.prompts" in message) == key.startswith("explore")
    assert len(message) < 450, "a typo is answered with near names, not with all of them"


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ({"overrides": ["explore.steps=0"]}, ["explore.steps", "--set", "0"]),
        ({"overrides": ["explore.precision=int4"]}, ["explore.precision", "--set", "'fp8'", "nvfp4"]),
        ({"files": {"a.yaml": {"optimizer": {"batch": "low"}}}}, ["optimizer.batch", "a.yaml", "'low'"]),
        ({"arguments": {"run": "a/../b"}}, ["run", "command line", "'a/../b'; expected a name of 1 to 64"]),
        ({"overrides": ["evaluate.rewards=[{}]"]}, ["evaluate.rewards", "--set", "{}"]),
        ({"overrides": ["optimizer.learning_rate=.nan"]}, ["optimizer.learning_rate", "--set", "nan"]),
    ],
)
def test_a_bad_value_names_its_setting_and_its_source(layers: dict[str, Any], said: list[str]) -> None:
    message = refusal(**layers)
    assert all(part in message for part in said), message


def test_a_dry_run_prints_each_setting_with_its_source_and_does_nothing(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("explore:\n  steps: 4\n")
    done = accepted(
        main,
        *("run", "--dry-run"),
        *("--preset", PRESET, "--config", str(file), "--output", str(tmp_path / "run"), "--iterations", "3"),
        *("--set", "optimizer.updates=2", "--set", "explore.keep=8"),
    )
    lines = done.stdout.splitlines()
    for line in (
        f"explore.steps: 4  # {file}:2",
        "optimizer.updates: 2  # --set",
        "explore.keep: 8  # --set",
        "iterations: 3  # command line",
        f"optimizer.learning_rate: {resolve(PRESET).config.optimizer.learning_rate}  # model mini-sana",
        "lora.rank: 32  # default",
    ):
        assert line in lines
    assert len(lines) == len(resolve(PRESET).sources)
    assert not (tmp_path / "run").exists()


def test_fast_keeps_the_models_rate_and_falls_to_the_end_of_the_run() -> None:
    for preset, rate in (("flux1/fast/imagereward", 3e-4), ("mini-text/fast/ocr", 1e-3)):
        config = resolve(preset, overrides=["iterations=30"]).config
        assert (config.optimizer.learning_rate, config.optimizer.cosine_iterations) == (rate, 30)
        assert (config.explore.candidates, config.explore.keep, config.optimizer.updates) == (24, 4, 6)
        assert config.two_stage


@pytest.mark.parametrize("recipe", RECIPES)
def test_settings_can_be_given_back(recipe: str) -> None:
    """As a dry run prints them, and as a run's folder has them."""
    first = resolve(f"flux1/{recipe}/hpsv2", overrides=[r'reward_options={clipscore: {model: "two\nlines # of text"}}'])
    for text in ("\n".join(sourced_yaml(first)), settings_yaml(first.config)):
        files = {"settings.yaml": yaml.safe_load(text)}
        assert resolve(DEFAULT_PRESET, files=files).config == first.config
        assert resolve(DEFAULT_PRESET, files=files, arguments={"run": "b"}).config.output == Path("runs/b")


def test_the_list_of_presets_shows_extras_in_brackets() -> None:
    assert "reads; needs solrl[ocr]" in accepted(main, "presets", COLUMNS="200").stdout


def test_a_shell_completes_commands_and_options(tmp_path: Path) -> None:
    script = """
    COMP_WORDS=(solrl-train ex); COMP_CWORD=1; _tyro_solrl_train; echo "${COMPREPLY[@]}"
    COMP_WORDS=(solrl-train export --ch); COMP_CWORD=2; _tyro_solrl_train; echo "${COMPREPLY[@]}"
    """
    completion = typed(main, "--tyro-print-completion", "bash").stdout
    done = subprocess.run(["bash", "-c", completion + script], capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines()[-2:] == ["export", "--checkpoint"], done.stderr


def test_a_model_is_requested_by_the_services_name_for_it() -> None:
    model = "/models/My Model (v2)/"
    config = resolve(PRESET, overrides=[f"model={model}"]).config
    assert config.model_name == "my-model--v2" == RolloutSettings(model=(model,)).models[0].name
    assert resolve(PRESET, overrides=[f"model={model}", "served_as=other"]).config.model_name == "other"


def test_a_service_explores_one_version_behind_unless_told_otherwise() -> None:
    cases: list[tuple[list[str], int, str]] = [
        *((local, 0, "rollout_url") for local in ([], ["regenerate.at=none"], [SERVED, "rollout_url=null"])),
        *(([SERVED], 1, "rollout_url"), ([SERVED, "explore.lag=null"], 1, "rollout_url")),
        *(([SERVED, f"explore.lag={lag}"], lag, "--set") for lag in (0, 2)),
    ]
    for overrides, lag, why in cases:
        found = resolve(PRESET, overrides=overrides)
        assert (found.config.lag, found.sources["explore.lag"]) == (lag, why)
        shown = f"explore.lag: {lag}  # {why}"
        assert (shown if why == "--set" else f"# {shown}") in sourced_yaml(found)
        assert f"lag: {lag}" in settings_yaml(found.config)
        saved = RunConfig.model_validate_json(found.config.model_dump_json())
        again = resolve_again(saved)
        assert (again.config.lag, again.sources["explore.lag"]) == (lag, str(saved.output / "config.json"))


def test_only_recipes_that_regenerate_explore_behind_also_when_continued() -> None:
    """Samples then come from the newest version; a loss without a ratio would be wrong on those of an older one."""
    for preset in (f"mini-sana/{recipe}/clipscore" for recipe in RECIPES):
        if resolve(preset).config.two_stage:
            assert resolve(preset, overrides=[SERVED]).config.lag == 1
        else:
            with pytest.raises(ConfigError, match="expected at=trainer, or rollout_url=null"):
                resolve(preset, overrides=[SERVED])
    # A run that is continued may explore elsewhere at its lag.
    served, local = (resolve(PRESET, overrides=given).config for given in ([SERVED], []))
    assert resolve_again(local, overrides=[SERVED]).config.lag == 0
    with pytest.raises(ConfigError, match=r"lag is for exploration at a service.*expected explore\.lag=0"):
        resolve_again(served, overrides=["rollout_url=null"])
    assert not resolve_again(served, overrides=["rollout_url=null", "explore.lag=0"]).config.uses_service


STOCHASTIC = "mini-sana/flowgrpo_two_stage/clipscore"
FITTED = "{sigmas: [1.0, 0.5], step_coeffs: [[0.5, 0.5]], x0_coeffs: [[0.0, 1.0], [0.0, 0.0, 1.0]]}"
SERVED = "rollout_url=http://gpu-node:8100"
AT_TRAINER = ["regenerate.at=trainer"]
ONE_STAGE = ["regenerate.at=none"]
TWO = ["explore.steps=2", "regenerate.steps=2"]


@pytest.mark.parametrize(
    ("preset", "overrides", "said"),
    [
        *((PRESET, ["explore.steps"], "expected key=value"), (PRESET, ["explore.steps=["], "explore.steps")),
        (PRESET, ["steps=3"], "'explore.steps'.*'regenerate.steps'|'regenerate.steps'.*'explore.steps'"),
        (PRESET, ["rewards={clipscore: 0}"], "every reward has weight 0"),
        (PRESET, ["explore.candidates=12", "explore.keep=24"], "keep.*12"),
        (PRESET, [f"explore.fitted={FITTED}", "explore.steps=2", *ONE_STAGE], r"explore\.fitted generates cheap"),
        (PRESET, [SERVED, "regenerate.at=none"], r"setting regenerate \(from --set\).*not with candidates to train on"),
        ("mini-sana/naive_quant/clipscore", AT_TRAINER, "recipe naive_quant, which trains on .*, or recipe sol_rl"),
        ("mini-sana/awm/clipscore", AT_TRAINER, "from --set for recipe awm, .*, or recipe awm_two_stage"),
        (PRESET, ["explore.lag=1"], "lag is for exploration at a service"),
        (STOCHASTIC, ["explore.steps=6"], r"explore\.steps is 6 and regenerate\.steps 10 .*expected equal numbers"),
        (STOCHASTIC, ["explore.steps=1", "regenerate.steps=1"], "first step with noise is 0 of 1 explore"),
        (STOCHASTIC, ONE_STAGE, "the candidates are the training samples"),
        (STOCHASTIC, [f"explore.fitted={FITTED}", *TWO], r"explore\.fitted and explore\.sampler=training; .*=null"),
        (STOCHASTIC, ["algorithm.eta=11"], "less than or equal to 10"),
        (PRESET, ["explore.sampler=training", "explore.steps=10"], "samples of diffusionnft do not take stochastic"),
        (PRESET, ["explore.sampler=sde"], "'ode' or 'training'"),
        (PRESET, [SERVED, "explore.share=0"], "explore.share"),
        (PRESET, ["explore.share=0.5"], "share is 0.5, but no service explores; expected explore.share=1"),
    ],
)
def test_settings_that_cannot_be_are_refused(preset: str, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve(preset, overrides=overrides)


def test_a_plan_has_the_window_of_its_iteration() -> None:
    config = resolve("mini-sana/flowgrpo_fast_two_stage/clipscore", overrides=["solver=dpm2"]).config
    plans = [config.exploration_plan(iteration) for iteration in range(20)]
    assert len({plan.sde.first for plan in plans if plan.sde}) > 1
    for iteration, plan in enumerate(plans):
        assert plan.solver_spec == config.training_data.solver("dpm2", 10, iteration, config.seed)
        assert (plan.steps, plan.fitted) == (config.regenerate.steps, None)
    assert resolve(PRESET).config.exploration_plan(0).solver_spec == "euler"


# Text tokens, sigmas, LoRA targets and layers belong to the families and are tested there.
OF_A_MODEL = ("model", "solver", "evaluate.steps", "algorithm.timestep_fraction", "optimizer.max_grad_norm")
OF_A_MODEL += ("optimizer.batch",)
MODELS: dict[str, tuple[Any, ...]] = {
    "sana": ("Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers", "euler", 40, 0.6, 1.0, 16),
    "sd3": ("stabilityai/stable-diffusion-3.5-large", "dpm2", 40, 0.6, 0.002, 4),
    # NVlabs/DiffusionNFT, config/nft.py; the other settings are Sol-RL's, too.
    "sd3-medium": ("stabilityai/stable-diffusion-3.5-medium", "dpm2", 40, 0.99, 1.0, 9),
    "flux1": ("black-forest-labs/FLUX.1-dev", "dpm2", 28, 0.4, 1.0, 12),
}
COMMON: dict[str, Any] = {
    **{"guidance": 1.0, "seed": 42, "explore.prompts": 48, "explore.keep": 24, "explore.lag": 0},
    **{"regenerate.steps": 10, "lora.rank": 32, "lora.alpha": 64.0},
    **{"optimizer.learning_rate": 3e-4, "optimizer.weight_decay": 1e-4, "optimizer.updates": 1},
    **{"algorithm.name": "diffusionnft", "algorithm.global_std": True, "algorithm.beta": 1.0},
    **{"algorithm.adv_clip": 5.0, "algorithm.kl_weight": 1e-4},
    **{"policy.ema": 0.9, "policy.decay_rate": 0.001, "policy.decay_max": 0.5},
}
EXPLORED: dict[str, dict[str, Any]] = {
    "diffusionnft": {"precision": "bf16", "steps": 10, "candidates": 24},
    "naive_scaling": {"precision": "bf16", "steps": 10, "candidates": 96},
    "naive_quant": {"precision": "nvfp4", "steps": 10, "candidates": 96},
    # NVFP4 in the paper; `auto` selects it on GPUs like the paper's.
    "sol_rl": {"precision": "auto", "steps": 6, "candidates": 96},
}


@pytest.mark.parametrize("reward", ["clipscore", "pickscore", "hpsv2", "imagereward"])
@pytest.mark.parametrize("recipe", EXPLORED)
@pytest.mark.parametrize("model", MODELS)
def test_a_published_preset_has_the_papers_settings(model: str, recipe: str, reward: str) -> None:
    config = resolve(f"{model}/{recipe}/{reward}").config
    wanted = (
        dict(zip(OF_A_MODEL, MODELS[model], strict=True))
        | COMMON
        | {f"explore.{key}": value for key, value in EXPLORED[recipe].items()}
    )
    wanted |= {"rewards": {reward: 1.0}}
    found = {}
    for key in wanted:
        value: Any = config
        for part in key.split("."):
            value = getattr(value, part)
        found[key] = value
    assert found == wanted
