"""The pages on extending: the examples work and have the stated number of lines."""

import json
import re
import subprocess
import sys
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AuraFlowPipeline, AuraFlowTransformer2DModel, AutoencoderKL, FlowMatchEulerDiscreteScheduler
from PIL import ExifTags, Image
from solrl_core.families import Backbone, load_backbone
from solrl_core.families.own_pipeline import by_own_pipeline
from solrl_core.reward_registry import REWARDS
from solrl_core.rewards import RewardSet
from solrl_core.rewards.loading import CONFIG, TOKENIZER
from solrl_core.rewards.reward import prompt_fault
from solrl_core.sampling.generator import Generator
from solrl_remote.vlm_judge import TEMPLATE, VlmJudge
from solrl_trainer.algorithms.training_data import ForwardBatch, TrajectoryBatch
from solrl_trainer.commands.run import run
from solrl_trainer.run_folder.metrics_file import read_metrics
from solrl_trainer.settings.presets import resolve
from tests.core.families.tiny_pipelines import VAE, save, t5_tokenizer
from tests.docs.fences import ROOT, blocks, commands
from tests.trainer.training_helpers import QUICK
from transformers import Dinov2Config, Dinov2Model, UMT5Config, UMT5EncoderModel

REWARD, ALGORITHM, FAMILY = (f"docs/extending/{name}.md" for name in ("reward", "algorithm", "family"))
IPO = "my_algorithms:DiffusionIpo"
COLOURS = "my_rewards:colourfulness"
SIDE = 64


@pytest.fixture(scope="module")
def mini() -> Backbone:
    return load_backbone("mini-sana")


def overrides(page: str, part: str) -> list[str]:
    """Settings in the page's first `solrl-train run` command with `part` in its words."""
    runs = [c for block in blocks(page, "sh") for c in commands(block) if c[:2] == ["solrl-train", "run"]]
    words = next(words for words in runs if part in " ".join(words))
    return [value for flag, value in pairwise(words) if flag == "--set"]


@pytest.mark.parametrize("name", [COLOURS, "colourfulness"])
def test_the_reward_scores_images(examples: Path, mini: Backbone, name: str) -> None:
    rewards = RewardSet.load([name], mini)
    assert rewards.digests()[f"reward:{name}"].startswith("sha256:")
    grey = torch.rand(1, 1, 32, 32).expand(1, 3, 32, 32)
    red, vivid = torch.zeros(1, 3, 32, 32), torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0)).round()
    red[:, 0] = 1
    found = rewards.score([name], torch.cat([grey, red, vivid]), ["a"] * 3, [{}] * 3)[name]
    # The expected score: a mean of (1, 1/2), no spread.
    assert found[0] == pytest.approx(0, abs=1e-6)
    assert found[1] == pytest.approx(0.3 * 1.25**0.5, rel=1e-5)
    assert found[2] > found[1]


def test_the_script_scores_pngs_by_the_reward(examples: Path, tmp_path: Path) -> None:
    (tmp_path / "my_pngs").mkdir()
    for name, colour in (("grey", (90, 90, 90)), ("red", (255, 0, 0))):
        Image.new("RGB", (8, 8), colour).save(tmp_path / f"my_pngs/{name}.png")
    words = [sys.executable, examples / "score_pngs.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["0.000 grey.png", f"{0.3 * 1.25**0.5:.3f} red.png"]


def test_a_reward_of_flow_grpo_is_one_of_ours(tmp_path: Path, mini: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = [block for block in blocks("docs/flow-grpo.md", "python") if "flow_grpo" in block.text]
    (tmp_path / "flow_grpo").mkdir()
    score = "lambda images, prompts, metadata: (images.mean((1, 2, 3)).numpy(), {})"
    theirs = f"def jpeg_compressibility():\n    return {score}\n"
    (tmp_path / "flow_grpo/rewards.py").write_text(theirs)
    (tmp_path / "their_reward.py").write_text(block.text)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    name = "their_reward:compressibility"
    images = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    scores = RewardSet.load([name], mini).score([name], images, ["a", "b"], [{}, {}])[name]
    assert torch.equal(scores, images.mean((1, 2, 3)))


def test_the_demands_on_prompts_are_checked() -> None:
    (block,) = [block for block in blocks(REWARD, "python") if "checks_prompts" in block.text]
    names: dict[str, Any] = {}
    exec(block.text, names)
    assert prompt_fault(names["counted"], "two dogs", {"count": 2}) is None
    assert prompt_fault(names["counted"], "dogs", {}) == "its count is None; expected a whole number from 1 to 16"


def test_the_judge_takes_the_page_s_options() -> None:
    (words,) = [c for block in blocks(REWARD, "sh") for c in commands(block) if "vlm_judge" in c]
    given = [words[words.index("--reward-options") + 1], *(block.text for block in blocks(REWARD, "json"))]
    config = resolve("sd3-medium/fast/clipscore", overrides=overrides(REWARD, "vlm_judge")).config
    every = [config.reward_options, *map(json.loads, given)]
    assert len(every) == 3
    for options in (options["vlm_judge"] for options in every):
        signature(VlmJudge).bind(**options)
        assert "{prompt}" in options.get("template", TEMPLATE)


def test_the_page_says_what_to_download_for_each_option() -> None:
    table = (ROOT / REWARD).read_text().partition("### Without a network")[2]
    said: dict[str, set[tuple[str, str]]] = {}
    name = ""
    for line in table.splitlines():
        if found := re.match(r"\| (?:`(\w+)`)? ?\| `(\w+)` \| `(.*)` \|$", line):
            name = found[1] or name
            said.setdefault(name, set()).add((found[2], found[3]))
    for name in REWARDS.built_in:
        loaded = getattr(REWARDS.find(name), "sources", lambda options: ())({})
        whole = {source.where for source in loaded if source.file == CONFIG}
        needed = [source for source in loaded if source.file != TOKENIZER or source.where not in whole]
        assert said.get(name, set()) == {(source.option, source.download) for source in needed}, name


def test_the_page_lists_the_rewards_that_are_there() -> None:
    listed = re.findall(r"^\| (`.*?) \|", (ROOT / REWARD).read_text(), re.MULTILINE)
    names = {name for cell in listed for name in re.findall(r"`(\w+)`", cell)}
    assert names == {"vlm_judge", *REWARDS.built_in}


def test_the_algorithm_trains(examples: Path, tmp_path: Path) -> None:
    few = ("explore.prompts=1", "explore.candidates=8", "explore.keep=4", "optimizer.batch=8", "evaluate.guards=[]")
    settings = [*overrides(ALGORITHM, "my_algorithms"), *QUICK, *few]
    changes: Any = {"overrides": settings, "arguments": {"output": tmp_path}}
    config = resolve("mini-sana/fast/clipscore", **changes).config
    assert (config.algorithm.name, config.algorithm.tau) == (IPO, 10)  # type: ignore[attr-defined]
    run(config)
    line = next(line for line in read_metrics(tmp_path / "metrics.jsonl") if line["event"] == "iteration")
    assert 0 <= line["objective/accuracy"] <= 1
    # Before the first step, current and reference agree and the loss is 1; then it falls.
    assert 0 < line["loss"] < 1
    assert line["objective/margin"] > 0
    assert json.loads((tmp_path / "config.json").read_text())["algorithm"]["tau"] == 10


def test_the_policy_gradient_trains_on_the_policy_that_generated(examples: Path, tmp_path: Path) -> None:
    settings = [*overrides(ALGORITHM, "my_gradient"), *QUICK, "explore.prompts=1", "explore.candidates=4"]
    changes: Any = {"overrides": [*settings, "explore.keep=4", "optimizer.batch=8"], "arguments": {"output": tmp_path}}
    config = resolve("mini-sana/flowgrpo/clipscore", **changes).config
    assert config.policy.decay_max == 0
    run(config)
    line = next(line for line in read_metrics(tmp_path / "metrics.jsonl") if line["event"] == "iteration")
    assert line["objective/ratio"] == pytest.approx(1, abs=1e-2)
    # The loss is 0 before the first step, since advantages have mean 0.
    assert abs(line["loss"]) < 1e-2
    assert line["grad_norm"] > 0


def test_the_policy_gradient_raises_the_probability_of_better_steps(examples: Path) -> None:
    from my_gradient import ClippedGradient, GradientSettings
    from solrl_core.sampling.sampler import make_solver
    from solrl_core.sampling.sde import StochasticSolver
    from solrl_trainer.algorithms.algorithm import Velocities

    algorithm = ClippedGradient(GradientSettings(clip_range=0.1))
    solver = make_solver(algorithm.trains_on.solver("euler", 10, 0, 0))
    assert isinstance(solver, StochasticSolver)
    random = torch.Generator().manual_seed(0)
    x, x_next, v = (torch.randn(2, 4, generator=random) for _ in range(3))
    sigma, sigma_next = torch.full((2,), 0.5, dtype=torch.float64), torch.full((2,), 0.4, dtype=torch.float64)
    before = solver.log_prob(x, sigma, sigma_next, v, x_next)
    batch = TrajectoryBatch(x, sigma.float(), torch.tensor([1.0, -1.0]), x_next, sigma, sigma_next, before, solver)
    v.requires_grad_()
    result = algorithm.loss(batch, Velocities(v, {}))
    assert float(result.value.detach()) == pytest.approx(0, abs=1e-6)
    (slope,) = torch.autograd.grad(result.value, v)
    after = batch.log_prob_under(v.detach() - 1e-3 * slope)
    assert after[0] > before[0]
    assert after[1] < before[1]


def test_the_algorithm_prefers_the_better_sample(examples: Path) -> None:
    from my_algorithms import DiffusionIpo, IpoSettings
    from solrl_trainer.algorithms.algorithm import Velocities

    algorithm = DiffusionIpo(IpoSettings(tau=2))
    advantages = torch.tensor([0.5, -1.0, 2.0, 0.0, *(3.0, 1.0, 2.0, -4.0)])
    assert algorithm.units(advantages, 4).tolist() == [[2, 1], [0, 3], [4, 7], [6, 5]]
    x0, noise = torch.randn(2, 3), torch.randn(1, 3).expand(2, 3)
    v_ref = noise - x0 + 1
    v = v_ref - torch.tensor([[0.1], [0.0]])  # nearer to the better sample
    batch = ForwardBatch((x0 + noise) / 2, torch.full((2,), 0.5), torch.zeros(2), x0, noise)
    result = algorithm.loss(batch, Velocities(v, {"reference": v_ref}))
    margin = 1 - 0.9**2
    figures = {name: float(figure) for name, figure in result.figures.items()}
    assert figures == {"accuracy": 1.0, "margin": pytest.approx(margin, rel=1e-4)}
    assert float(result.value) == pytest.approx((4 * margin - 1) ** 2, rel=1e-3)


@pytest.fixture(scope="module")
def auraflow(examples: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny AuraFlow with random weights."""
    folder = tmp_path_factory.mktemp("models") / "auraflow"
    torch.manual_seed(0)
    tokenizer = t5_tokenizer()
    pipeline = AuraFlowPipeline(
        tokenizer=tokenizer,
        text_encoder=UMT5EncoderModel(
            UMT5Config(vocab_size=len(tokenizer), d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2)
        ),
        vae=AutoencoderKL(**VAE | {"shift_factor": None}),
        transformer=AuraFlowTransformer2DModel(
            sample_size=SIDE // 8,
            num_mmdit_layers=1,
            num_single_dit_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            caption_projection_dim=32,
            pos_embed_max_size=16,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.73),
    )
    save(pipeline, folder)
    (folder / "solrl.json").write_text(json.dumps({"max_sequence_length": 16}))
    return folder


@pytest.mark.parametrize("guidance", [1.0, 3.5])
def test_the_family_generates_the_images_of_its_pipeline(auraflow: Path, guidance: float) -> None:
    backbone: Any = load_backbone(str(auraflow))
    assert (backbone.family, backbone.latent_shape) == ("auraflow", (4, SIDE // 8, SIDE // 8))
    prompts = ["a red circle", "two blue squares"]
    ours = Generator(backbone, "bf16").generate(prompts, [3, 14], steps=4, guidance=guidance).images
    theirs = by_own_pipeline(backbone, prompts, [3, 14], 4, guidance)
    assert float((ours - theirs).abs().max()) <= 1e-5
    assert float(ours.std()) > 0.01
    assert float((ours[0] - ours[1]).abs().max()) > 1e-3


def test_the_family_is_quantised_and_adapted(auraflow: Path) -> None:
    backbone = load_backbone(str(auraflow))
    quantised = Generator(backbone, "nvfp4")
    assert quantised.backbone.quantized_share("nvfp4") > 0.9
    # Two streams of four projections in the first block, one stream in the others.
    assert len(quantised.layout) == 8 + 2 * 4


def test_the_class_of_the_page_on_rewards_prefers_images_like_the_photos(
    mini: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = [block for block in blocks(REWARD, "python") if "class Likeness" in block.text]
    (tmp_path / "my_photos.py").write_text(block.text)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    encoder, folder, name = tmp_path / "encoder", tmp_path / "my_cat", "my_photos:Likeness"
    torch.manual_seed(0)
    tiny = Dinov2Config(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
    Dinov2Model(tiny).save_pretrained(encoder)
    images, digests = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0)), []
    for number in range(2):
        folder.mkdir(exist_ok=True)
        pixels = (images[number] * 255).byte().permute(1, 2, 0).numpy()
        options = {"folder": str(folder), "encoder": str(encoder)}
        if not number:
            with pytest.raises(ValueError, match=r"no photos in .*; expected files that end in .jpeg, .jpg, .png"):
                RewardSet.load([name], mini, {name: options})
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = 6  # a viewer turns it by 270°
        turned = Image.fromarray(pixels).transpose(Image.Transpose.ROTATE_90)
        turned.save(folder / f"{number}.JPG", quality=100, subsampling=0, exif=exif)
        rewards = RewardSet.load([name], mini, {name: options})
        scores = rewards.score([name], images, ["a"] * 3, [{}] * 3)[name]
        assert set(range(3)) - {int(place) for place in scores.argsort(descending=True)[: number + 1]} == set(
            range(number + 1, 3)
        )
        assert scores.max() <= 1 + 1e-5
        digests.append(rewards.digests()[f"reward:{name}"])
    assert digests[0] != digests[1]
