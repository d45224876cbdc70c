"""Our trainer beside a stand-in for a peer's clone, which has the names that DiffusionNFT's drive relies on."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import peers
import pytest
import torch
from peer_drives.our_draws import draw_as_ours
from peer_drives.turns import Work
from solrl_core.sampling.noise import initial_noise
from solrl_proto.noise import expand_seeds
from solrl_trainer.policy.update import training_pairs
from solrl_trainer.rollouts.exploration import seed_root

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
    assert (config.seed, config.train.gradient_accumulation_steps, config.sample.num_batches_per_epoch) == (5, 1, 2)
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
    options = ["--learn", "2", "--seeds", "5", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["peers.py", str(clone), *options])
    peers.main()
    rows = json.loads((tmp_path / "peers.json").read_text())["rows"]
    assert {(row["trainer"], row["beside"], row["part"], row["seed"], len(row["rewards"])) for row in rows} == {
        ("ours", "Flow-GRPO", "learning", 5, 2),
        ("Flow-GRPO", "Flow-GRPO", "learning", 5, 2),
    }
    assert "| 1 to 2 | Flow-GRPO | 1 | " in (tmp_path / "peers.md").read_text()


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
    read = "config = flags.FLAGS.config\n    assert config.train.learning_rate == 3e-4"
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


@pytest.mark.parametrize(
    ("apart", "equal"), [((0.02, -0.02, 0.0), True), ((0.3, -0.3, 0.0), False), ((0.2,) * 3, False)]
)
def test_rewards_are_equal_if_the_whole_interval_lies_within_a_quarter_of_the_gain(
    apart: tuple[float, ...], equal: bool
) -> None:
    gained = np.arange(5) / 4  # 0.5 above the first turn in the mean
    rows = [{"beside": "peer", "trainer": "ours", "rewards": list(gained)} for _ in apart]
    rows += [{"beside": "peer", "trainer": "peer", "rewards": list(gained + by)} for by in apart]
    (span,) = peers.spans(rows)
    assert (span.first, span.last, span.margin, span.equal) == (1, 5, 0.125, equal)


def test_rewards_are_compared_within_equal_seconds() -> None:
    common = {"part": "learning, fast", "seed": 1}
    rows = [
        common | {"trainer": "ours", "cpu": [1.0] * 4, "rewards": [1.0, 2.0, 3.0, 5.0]},
        common | {"trainer": "DiffusionNFT", "cpu": [2.0, 2.0, 2.0], "rewards": [0.5, 2.5, 9.0]},
    ]
    first, second = peers.halves(rows)
    assert first == ("0 to 2", "1", "2.0", "1.0", "1.5000", "0.5000", "-1.0000 [no limit]")
    assert second == ("2 to 4", "1", "2.0", "1.0", "4.0000", "2.5000", "-1.5000 [no limit]")


@pytest.mark.parametrize("option", ["--same-draws", "--fast"])
def test_one_peer_has_our_draws_or_its_own_settings(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = stand_in(tmp_path / "clone", {"scripts/train_sd3.py": ""})
    monkeypatch.setattr(sys, "argv", ["peers.py", str(clone), "--learn", "1", option, "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="expected a clone of DiffusionNFT"):
        peers.main()


class NoAdvantages:
    """In the place of a peer's class of advantages."""

    def update(self, prompts: list[str], rewards: np.ndarray) -> None: ...


def test_a_peer_gets_our_draws_of_each_turn() -> None:
    shape, size, steps, trained = (1, 2, 2), 3, 10, 3
    work = Work("sd3-medium", "diffusionnft", "cpu", size, ("a", "b"), seed=7)
    script = SimpleNamespace(
        torch=SimpleNamespace(), pipeline_with_logprob=lambda latents: latents, PerPromptStatTracker=NoAdvantages
    )
    config = SimpleNamespace(sample=SimpleNamespace(num_steps=steps), train=SimpleNamespace(timestep_fraction=0.3))
    draw_as_ours(script, config, work, shape)
    for turn in range(2):
        for prompt in range(2):
            seeds = expand_seeds(seed_root(7, turn), str(prompt), size)
            assert torch.equal(script.pipeline_with_logprob(), initial_noise(seeds, shape))
        script.PerPromptStatTracker().update(["a"] * size + ["b"] * size, np.array([[2], [3], [1], [5], [4], [6]]))
        order = script.torch.randperm(2 * size).tolist()
        assert sorted([order[:size], order[size:]]) == [[1, 0, 2], [5, 3, 4]]
        levels = [script.torch.randperm(steps).tolist() for _ in order]
        assert all(sorted(row) == list(range(steps)) for row in levels)
        noise = torch.stack([script.torch.randn_like(None) for _ in range(2 * trained)]).view(2, trained, size, *shape)

        generator = torch.Generator().manual_seed(expand_seeds(7, f"update/{turn}", 1)[0])
        index, at = training_pairs(2 * size, steps, 0.3, generator)
        ours = torch.cat([torch.randn(size, *shape, generator=generator) for _ in range(2 * trained)])
        for sample, level, row in zip(index.tolist(), at.tolist(), ours, strict=True):
            batch, place = divmod(sample, size)
            assert torch.equal(noise[batch, levels[sample][:trained].index(level), place], row)
