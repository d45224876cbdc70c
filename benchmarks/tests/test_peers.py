"""Our trainer beside a stand-in for a peer's clone, which has the names that DiffusionNFT's drive relies on."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import peer_rewards
import peers
import pytest

pytestmark = pytest.mark.slow

CONFIG = """
import imp, os
import ml_collections

def get_config(name):
    assert name == "sd3_pickscore"
    config = ml_collections.ConfigDict()
    config.sample, config.train = ml_collections.ConfigDict(), ml_collections.ConfigDict()
    config.sample.train_batch_size, config.sample.num_steps = 9, 2
    config.train.timestep_fraction, config.train.learning_rate = 0.99, 1e-4
    return config
"""
PIPELINE = """
import torch

def pipeline_with_logprob(pipeline, prompt_embeds, steps):
    with torch.no_grad():
        latents = torch.randn(len(prompt_embeds), 4, 16, 16)
        return pipeline.vae.decode(latents, return_dict=False)[0].clamp(0, 1)
"""
SCRIPT = """
import os
import torch
import wandb
from absl import flags
from diffusers import StableDiffusion3Pipeline
from flow_grpo.sampler import pipeline_with_logprob
import flow_grpo.rewards
from ml_collections import config_flags
from torch.utils.data import DataLoader

class TextPromptDataset: ...

class DistributedKRepeatSampler: ...

class PerPromptStatTracker:
    def clear(self): ...

def main(_):
    config = flags.FLAGS.config
    wandb.init(project="none", config=config.to_dict())
    pipeline = StableDiffusion3Pipeline.from_pretrained("none")
    score = flow_grpo.rewards.multi_score("cpu", {})
    batches = iter(DataLoader(TextPromptDataset("none"), batch_sampler=DistributedKRepeatSampler(None)))
    while True:
        for _ in range(config.sample.num_batches_per_epoch):
            prompts, metadata = next(batches)
            states, pooled = compute_text_embeddings(prompts, [], [], max_sequence_length=128)
            images = pipeline_with_logprob(pipeline, prompt_embeds=states, steps=config.sample.num_steps)
            assert len(score(images, prompts, metadata)[0]["avg"]) == len(prompts)
        PerPromptStatTracker().clear()
        if FAILS:
            raise RuntimeError("this trainer fails")
"""


def stand_in(clone: Path, files: dict[str, str]) -> Path:
    """Write the files of a clone."""
    for name, text in files.items():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_text(text)
    return clone


@pytest.mark.parametrize("fails", [False, True])
def test_trainers_take_turns(fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    clone = stand_in(
        tmp_path / "clone",
        {
            "config/nft.py": CONFIG,
            "flow_grpo/sampler.py": PIPELINE,
            "scripts/train_nft_sd3.py": f"FAILS = {fails}\n{SCRIPT}",
        },
    )
    monkeypatch.setattr(sys, "argv", ["peers.py", str(clone), "--tiny", "--turns", "1", "--out", str(out)])
    if fails:
        with pytest.raises(SystemExit, match="a trainer failed"):
            peers.main()
    else:
        peers.main()
    rows = json.loads((out / "peers.json").read_text())["rows"]
    expected = {("ours", part, 4) for part in peers.PARTS}
    if not fails:
        expected |= {("DiffusionNFT", part, 4) for part in peers.PARTS}
    assert {(row["trainer"], row["part"], row["samples"]) for row in rows} == expected
    assert all(row["s"] > 0 and row["facts"]["weights"] == "float32" for row in rows if row["trainer"] != "ours")
    shown = (out / "peers.md").read_text()
    assert ("| SD3.5-M 512², 4 | DiffusionNFT | " in shown) is not fails


GRPO_CONFIG = CONFIG.replace("sd3_pickscore", "pickscore_sd3")
AS_OURS = """
SEEN = []
DECODED = pipeline_with_logprob

def pipeline_with_logprob(pipeline, prompt_embeds, steps):
    from absl import flags
    config = flags.FLAGS.config
    assert (config.train.learning_rate, config.train.cfg, config.sample.guidance_scale) == (1e-3, False, 1.0)
    assert (config.seed, config.train.gradient_accumulation_steps, config.sample.num_batches_per_epoch) == (21, 1, 2)
    SEEN.append(prompt_embeds)
    if len(SEEN) == 2:
        assert len(SEEN[0]) == len(SEEN[1]) == 18 and not torch.equal(SEEN[0], SEEN[1])
    return DECODED(pipeline, prompt_embeds, steps)
"""


def test_flow_grpo_learns_with_our_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clone = stand_in(
        tmp_path / "clone",
        {
            "config/grpo.py": GRPO_CONFIG,
            "flow_grpo/sampler.py": PIPELINE + AS_OURS,
            "scripts/train_sd3.py": f"FAILS = False\n{SCRIPT}",
        },
    )
    options = ["--learn", "2", "--seeds", str(peer_rewards.FRESH), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["peers.py", str(clone), *options])
    peers.main()
    rows = json.loads((tmp_path / "peers.json").read_text())["rows"]
    assert {(row["trainer"], row["beside"], row["part"], row["seed"], len(row["rewards"])) for row in rows} == {
        ("ours", "Flow-GRPO", "learning", 21, 2),
        ("Flow-GRPO", "Flow-GRPO", "learning", 21, 2),
    }
    shown = (tmp_path / "peers.md").read_text()
    ours, theirs = (np.mean(row["cpu"]) for row in rows)
    assert "| 1 to 2 | Flow-GRPO | 1 | " in shown
    assert f" | {ours:.1f} | {theirs:.1f} |\n" in shown
    assert f"Our turn takes {'more' if ours > theirs else 'fewer'} " in shown
    assert "Commits of the clones: Flow-GRPO not known." in shown


SANA_CONFIG = """
import ml_collections

def get_config(name):
    assert name == "sana_diffusionnft_pickscore"
    sample, train = ml_collections.ConfigDict(), ml_collections.ConfigDict(batch_size=16, timestep_fraction=0.6)
    native = {"native_config": "native.yaml", "rollout_sample_num_steps": 10}
    return ml_collections.ConfigDict(sample=sample, train=train, **native)
"""
SANA_LAYERS = """
from diffusion.model.builder import MODELS
from diffusion.model.nets.fastlinear.modules import TritonLiteMLA
from diffusion.utils.dist_utils import get_rank
from diffusion.utils.logger import get_root_logger
from mmcv import Registry
from timm.data import IMAGENET_DEFAULT_MEAN
from torch import nn

FFN_BLOCKS = Registry("ffn_blocks")

@MODELS.register_module()
class SanaMSLinearFFN(nn.Conv2d):
    def __init__(self, depth, hidden_size, num_heads, patch_size, input_size, in_channels, **_):
        assert (depth, hidden_size, num_heads, patch_size, input_size, get_rank()) == (5, 192, 6, 2, 8, 0)
        super().__init__(in_channels, 8, 1)
"""
SANA_SCRIPT = """
import diffusion.model.nets.sana_multi_scale
import diffusion.post_training.rewards
import torch
import yaml
from absl import flags
from diffusers import SanaPipeline
from diffusion.model.builder import MODELS
from tools.download import find_model

flags.DEFINE_string("native_config", "", "")

class PerPromptStatTracker:
    def clear(self): ...

def model_init_config(native, latent_size):
    return {"input_size": latent_size, "in_channels": native["vae"]["vae_latent_dim"]}

def pipeline_with_logprob_sana(transformer, vae, *, latents):
    with torch.no_grad():
        return vae.decode(transformer(latents), return_dict=False)[0].clamp(0, 1)

def _rollout_for_one_prompt(transformer, vae, size):
    images = pipeline_with_logprob_sana(transformer, vae, latents=torch.randn(4, 8, size, size))
    rewards, _ = diffusion.post_training.rewards.multi_score("cpu", {})(images, ["a"] * 4, [{}] * 4)
    assert images.shape == (4, 3, 64, 64) and len(rewards["avg"]) == 4

def main(_):
    config, size = flags.FLAGS.config, flags.FLAGS.config.resolution // 32
    with open(flags.FLAGS.native_config) as file:
        native = yaml.safe_load(file)
    settings = model_init_config(native, latent_size=size)
    transformer = MODELS.build({"type": native["model"]["model"]}, default_args=settings)
    transformer.load_state_dict(find_model("none"), strict=False)
    pipeline = SanaPipeline.from_pretrained("none")
    del pipeline.transformer
    _, loader, *_ = build_datasets_and_loaders(config, 1, 0)
    for prompts, _ in loader:
        states, mask, _, _ = compute_text_embeddings(prompts, pipeline, max_sequence_length=300, device="cpu")
        assert states.shape[:2] == mask.shape
        _rollout_for_one_prompt(transformer, pipeline.vae, size)
        PerPromptStatTracker().clear()
"""
NATIVE = "model: {model: SanaMSLinearFFN_1600M_P1_D20}\nvae: {vae_latent_dim: 32}\n"


def test_sol_rl_trains_sana_with_its_own_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clone = stand_in(
        tmp_path / "clone",
        {
            "configs/sol_rl/sana.py": SANA_CONFIG,
            "diffusion/model/nets/__init__.py": "import sana_video",
            "diffusion/model/nets/sana_multi_scale.py": SANA_LAYERS,
            "native.yaml": NATIVE,
            "train_scripts/sol_rl/train_flux1.py": "",
            "train_scripts/sol_rl/train_sana.py": SANA_SCRIPT,
        },
    )
    options = ["--models", "sana", "--tiny", "--turns", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["peers.py", str(clone), *options])
    peers.main()
    rows = json.loads((tmp_path / "peers.json").read_text())["rows"]
    facts = {(row["trainer"], row["part"]): row["facts"] for row in rows}
    assert set(facts) == {(trainer, part) for trainer in ("ours", "Sol-RL") for part in peers.PARTS}
    expected = {"levels": 6, "recomputed": "no block", "sampled at once": 4, "trained at once": 4}
    for trainer in ("ours", "Sol-RL"):
        assert facts[trainer, "train"].items() >= expected.items()


def test_a_folder_that_is_no_clone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["peers.py", str(tmp_path), "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"expected the folder of a clone.*scripts/train_nft_sd3\.py"):
        peers.main()


def test_fast_takes_more_turns_beside_diffusionnft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = "config = flags.FLAGS.config\n    assert config.train.learning_rate == 1e-3"
    clone = stand_in(
        tmp_path / "clone",
        {
            "config/nft.py": CONFIG,
            "flow_grpo/sampler.py": PIPELINE,
            "scripts/train_nft_sd3.py": "FAILS = False\n" + SCRIPT.replace("config = flags.FLAGS.config", read),
        },
    )
    options = ["--learn", "1", "--seeds", "5", "--fast", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["peers.py", str(clone), *options])
    peers.main()
    rows = json.loads((tmp_path / "peers.json").read_text())["rows"]
    assert {row["trainer"]: len(row["rewards"]) for row in rows} == {"ours": 3, "DiffusionNFT": 1}
    assert all(len(row["cpu"]) == len(row["rewards"]) and min(row["cpu"]) > 0 for row in rows)


@pytest.mark.parametrize("option", ["--same-draws", "--fast"])
def test_one_peer_has_our_draws_or_its_own_settings(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = stand_in(tmp_path / "clone", {"scripts/train_sd3.py": ""})
    monkeypatch.setattr(sys, "argv", ["peers.py", str(clone), "--learn", "1", option, "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="expected a clone of DiffusionNFT"):
        peers.main()


@pytest.mark.parametrize("name", ["scripts/train_nft_sd3.py", "src/flow_factory/trainers/nft.py"])
def test_a_peer_that_compiles_nothing_is_not_timed_as_compiled(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = stand_in(tmp_path / "clone", {name: ""})
    monkeypatch.setattr(sys, "argv", ["peers.py", str(clone), "--compiled", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match=r"got --compiled with .*; expected .* compiled copy of its model: Sol-RL"):
        peers.main()


def test_a_clone_has_the_commit_that_git_names(tmp_path: Path) -> None:
    assert peers.commit_of(tmp_path) == ""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    assert re.fullmatch("[0-9a-f]{40}", peers.commit_of(tmp_path))


SOL_RL_CONFIG = """
import ml_collections

def get_config(name):
    assert name == NAME
    sample, train = ml_collections.ConfigDict(), ml_collections.ConfigDict(batch_size=12, timestep_fraction=0.4)
    return ml_collections.ConfigDict(sample=sample, train=train, rollout_sample_num_steps=10)
"""
SOL_RL_SCRIPT = """
import diffusion.post_training.rewards
import torch
from absl import flags

class PerPromptStatTracker:
    def clear(self): ...

def _build_sd3_latents_from_seeds(seeds, latent_shape):
    return torch.randn(len(seeds), *latent_shape)

def pipeline_with_logprob_MODEL(pipeline, size):
    with torch.no_grad():
        latents = torch.randn(size, pipeline.vae.config.latent_channels, 16, 16)
        return pipeline.vae.decode(latents, return_dict=False)[0].clamp(0, 1)

def _rollout_for_one_prompt(pipeline, prompt, size):
    images = pipeline_with_logprob_MODEL(pipeline, size=size)
    return diffusion.post_training.rewards.multi_score("cpu", {})(images, [prompt] * size, [{}] * size)

def main(_):
    config = flags.FLAGS.config
    sample, train = config.sample, config.train
    pipeline = PIPELINE.from_pretrained("none")
    _, loader, *_ = build_datasets_and_loaders(config, 1, 0)
    for prompts, _ in loader:
        assert sample.num_image_per_prompt == sample.best_of_n == sample.full_rollout_num
        assert sample.rollout_batch_size * sample.per_prompt_iter_num == sample.full_rollout_num
        assert len(prompts) == sample.per_gpu_to_process_prompts
        assert len(prompts) * sample.full_rollout_num == sample.per_gpu_total_samples_to_train
        CHECK
        for prompt in prompts:
            _rollout_for_one_prompt(pipeline, prompt, sample.full_rollout_num)
        PerPromptStatTracker().clear()
"""


def sol_rl(clone: Path, name: str, model: str, pipeline: str, settings: str, check: str) -> Path:
    script = SOL_RL_SCRIPT.replace("MODEL", model).replace("PIPELINE", pipeline).replace("CHECK", f"assert {check}")
    files = {f"configs/sol_rl/{name}.py": SOL_RL_CONFIG.replace("NAME", repr(settings))}
    files |= {"train_scripts/sol_rl/train_flux1.py": "", f"train_scripts/sol_rl/train_{name}.py": script}
    return stand_in(clone, files)


def test_sol_rl_learns_with_our_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = """(
            (config.seed, config.mixed_precision, config.rollout_sample_num_steps, len(prompts)) == (5, "no", 10, 2)
            and (train.batch_size, train.learning_rate, train.timestep_fraction) == (18, 1e-3, 0.3)
            and sample.full_rollout_num == 18 and train.n_batch_per_epoch == train.gradient_accumulation_steps == 2
        )"""
    pipeline = "StableDiffusion3Pipeline"
    clone = sol_rl(tmp_path / "clone", "sd3", "sd3", pipeline, "sd3_diffusionnft_pickscore", check)
    options = ["--learn", "1", "--seeds", "5", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["peers.py", str(clone), *options])
    peers.main()
    rows = json.loads((tmp_path / "peers.json").read_text())["rows"]
    assert [(row["trainer"], row["model"], len(row["rewards"])) for row in rows] == [
        ("ours", "sd3", 1),
        ("Sol-RL", "sd3", 1),
    ]


def test_compiled_samples_have_lines_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = f"(sample.full_rollout_num, train.batch_size) == ({peers.TINY}, {peers.TINY})"
    clone = sol_rl(tmp_path / "clone", "flux1", "flux", "FluxPipeline", "flux1_compile_pickscore", check)
    options = ["--models", "flux", "--tiny", "--turns", "1", "--compiled", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["peers.py", str(clone), *options])
    peers.main()
    rows = json.loads((tmp_path / "peers.json").read_text())["rows"]
    assert {(row["trainer"], row["part"]) for row in rows} == {("ours", peers.COMPILED), ("Sol-RL", peers.COMPILED)}
    shown = (tmp_path / "peers.md").read_text()
    assert shown.count("| FLUX.1 512², 4 | Sol-RL, `--compiled` | ") == 1
    assert "| FLUX.1 512² | Sol-RL, `--compiled` | 4 | DPM-Solver++(2M) | 10 | 1 | flash | " in shown


FLOW_FACTORY = {
    "models/flux/flux1.py": "",
    "trainers/nft.py": "",
    "trainers/abc.py": "",
    "rewards/__init__.py": """
class PointwiseRewardModel: ...

class RewardModelOutput:
    def __init__(self, rewards):
        self.rewards = rewards
""",
    "rewards/loader.py": "",
    "hparams.py": """
class Arguments:
    from_dict = dict
""",
    "trainers/__init__.py": """
import torch
from flow_factory.models.flux import flux1
from flow_factory.rewards import loader
from flow_factory.trainers import abc

EXPECTED = {
    "nft": {"num_inference_steps": 10, "num_train_timesteps": 4, "kl_beta": 1e-4, "per_device_batch_size": 4},
    "grpo": {
        **{"num_inference_steps": 6, "gradient_accumulation_steps": 5, "kl_beta": 0, "per_device_batch_size": 2},
        **{"num_sde_steps": 5, "sde_steps": None},
    },
}
COMMON = {"guidance_scale": 1.0, "group_size": 4, "unique_sample_num_per_epoch": 1, "resolution": 64}
LORA = {"lora_rank": 32, "lora_alpha": 64, "target_modules": ["to_q", "to_k", "to_v", "to_out.0"]}

class Adapter:
    def __init__(self):
        self.pipeline = flux1.FluxPipeline.from_pretrained("none")

    def decode_latents(self, latents):
        return self.pipeline.vae.decode(latents, return_dict=False)[0].clamp(0, 1)

class Trainer:
    def __init__(self, size):
        self.adapter, self.size = Adapter(), size
        self.loader, _ = abc.get_dataloader()
        self.reward = loader.get_reward_model_class("reward")()

    def start(self):
        while self.should_continue_training():
            self.optimize(self.sample())

    @torch.no_grad()
    def sample(self):
        batch = next(iter(self.loader))
        assert len(batch["prompt"]) == len(batch["prompt_embeds"]) == len(batch["pooled_prompt_embeds"]) == self.size
        latents = torch.randn(self.size, self.adapter.pipeline.vae.config.latent_channels, 8, 8)
        images = self.adapter.decode_latents(latents)
        assert self.reward(batch["prompt"], list(images)).rewards.shape == (self.size,)

    def optimize(self, samples): ...

def load_trainer(settings):
    train = settings["train"] | settings["scheduler"]
    assert train.items() >= (COMMON | EXPECTED[train["trainer_type"]]).items()
    assert settings["model"] == LORA and settings["eval"]["eval_freq"] == 0 and len(settings["rewards"]) == 1
    return Trainer(train["per_device_batch_size"])
""",
}


def test_flow_factory_trains_both_recipes_with_our_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"src/flow_factory/{name}": text for name, text in FLOW_FACTORY.items()}
    for kind in ("nft", "grpo"):
        settings = {name: {} for name in ("model", "scheduler", "eval", "eval_rewards", "log")}
        files[f"examples/{kind}/lora/flux1/default.yaml"] = json.dumps(settings | {"train": {"trainer_type": kind}})
    clone = stand_in(tmp_path / "clone", files)
    options = ["--models", "flux", "--tiny", "--turns", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["peers.py", str(clone), *options])
    peers.main()
    rows = json.loads((tmp_path / "peers.json").read_text())["rows"]
    levels = {(row["recipe"], row["trainer"]): row["facts"]["levels"] for row in rows}
    assert levels == {
        (recipe, trainer): level
        for recipe, level in (("diffusionnft", 4), ("flowgrpo", 5))
        for trainer in ("ours", "Flow-Factory")
    }
    assert "| FLUX.1 512², FlowGRPO | Flow-Factory | 5 | stochastic Euler | 6 | " in (tmp_path / "peers.md").read_text()
