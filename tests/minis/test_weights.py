"""The shipped weights: small, in BF16, loadable, documented, and as accurate as their cards say."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from solrl_core.families import Backbone, load_backbone
from solrl_core.fingerprint import module_digest
from solrl_core.rewards import load_reward
from solrl_minis import catalog

from minis_recipe import measure, preference
from minis_recipe.data import Source

MIB = 2**20
CLASSES = {
    "mini-sana": {
        "_class_name": "SanaPipeline",
        "vae": "AutoencoderDC",
        "transformer": "SanaTransformer2DModel",
        "text_encoder": "Gemma2Model",
        "scheduler": "FlowMatchEulerDiscreteScheduler",
    },
    "mini-sd3": {
        "_class_name": "StableDiffusion3Pipeline",
        "vae": "AutoencoderKL",
        "transformer": "SD3Transformer2DModel",
        "text_encoder": "CLIPTextModelWithProjection",
        "text_encoder_2": "CLIPTextModelWithProjection",
        "text_encoder_3": "T5EncoderModel",
        "tokenizer": "CLIPTokenizer",
        "tokenizer_3": "T5Tokenizer",
        "scheduler": "FlowMatchEulerDiscreteScheduler",
    },
    "mini-flux": {
        "_class_name": "FluxPipeline",
        "vae": "AutoencoderKL",
        "transformer": "FluxTransformer2DModel",
        "text_encoder": "CLIPTextModel",
        "text_encoder_2": "T5EncoderModel",
        "tokenizer": "CLIPTokenizer",
        "tokenizer_2": "T5Tokenizer",
        "scheduler": "FlowMatchEulerDiscreteScheduler",
    },
}
BACKBONES = list(CLASSES)
REWARDS = ("clipscore", "pickscore", "hpsv2", "imagereward")
TUNED = REWARDS[1:]
LIMITS = {"mini-sana": 8, "mini-sd3": 6, "mini-flux": 6} | {
    f"mini-{name}": 2 for name in ("clip", "pickscore", "hpsv2", "imagereward", "judge")
}
FILES = sorted(catalog.WEIGHTS.rglob("*.safetensors"))
CHECKPOINT = catalog.WEIGHTS / "mini-hpsv2" / "HPS_mini_compressed.pt"


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


@pytest.fixture(scope="module", params=BACKBONES)
def backbone(request: pytest.FixtureRequest) -> Backbone:
    return load_backbone(request.param)


@pytest.mark.parametrize("name", LIMITS)
def test_each_is_small(name: str) -> None:
    assert size(catalog.WEIGHTS / name) <= LIMITS[name] * MIB


def test_all_together_are_small() -> None:
    assert size(catalog.WEIGHTS.parent) <= 28 * MIB
    folders = {path.name for path in catalog.WEIGHTS.iterdir() if path.is_dir()}
    assert folders == set(LIMITS)


def test_nothing_but_tensors_json_and_the_card_is_shipped() -> None:
    files = [path for path in catalog.WEIGHTS.rglob("*") if path.is_file()]
    assert {path.suffix for path in files if path != CHECKPOINT} <= {".safetensors", ".json", ".md"}


def test_no_file_contains_a_path_of_the_training_machine() -> None:
    for path in catalog.WEIGHTS.rglob("*.json"):
        assert not re.search(r'": "/', path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(catalog.WEIGHTS)))
def test_they_are_bfloat16_and_finite(path: Path) -> None:
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert tensors
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())


def test_the_checkpoint_of_hpsv2_is_open_clips_and_holds_no_code() -> None:
    state = torch.load(CHECKPOINT, weights_only=True)["state_dict"]
    assert {"visual.proj", "text_projection", "logit_scale", "transformer.resblocks.0.attn.in_proj_weight"} <= set(
        state
    )
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    assert all(torch.isfinite(tensor).all() for tensor in state.values())


@pytest.mark.parametrize("name", BACKBONES)
def test_a_pipeline_is_of_the_familys_classes(name: str) -> None:
    index = json.loads((catalog.WEIGHTS / name / "model_index.json").read_text())
    found = {part: index[part] if part == "_class_name" else index[part][1] for part in CLASSES[name]}
    assert found == CLASSES[name]


def test_flux_has_a_guidance_embedding() -> None:
    config = json.loads((catalog.WEIGHTS / "mini-flux" / "transformer" / "config.json").read_text())
    assert config["guidance_embeds"]


def test_they_make_an_image_that_every_reward_scores(backbone: Backbone) -> None:
    assert (backbone.height, backbone.width) == (64, 64)
    image = backbone.decode(torch.zeros(1, *backbone.latent_shape))
    assert image.shape == (1, 3, 64, 64)
    for name in REWARDS:
        assert torch.isfinite(load_reward(name, backbone)(image, ["a red circle"], [{}])).all()


def test_loaded_weights_equal_the_files(backbone: Backbone) -> None:
    folder = catalog.WEIGHTS / backbone.name
    with safe_open(folder / "transformer" / "diffusion_pytorch_model.safetensors", "pt") as file:
        for name, tensor in backbone.transformer.state_dict().items():
            assert torch.equal(tensor, file.get_tensor(name).float())
    assert module_digest(backbone.transformer) == module_digest(load_backbone(str(folder)).transformer)


def test_nearly_all_linear_work_is_quantised(backbone: Backbone) -> None:
    assert backbone.quantized_share("nvfp4") >= 0.9


def card_accuracy(name: str) -> float:
    card = (catalog.WEIGHTS / name / "README.md").read_text(encoding="utf-8")
    found = re.search(r"strict accuracy.*\| ([\d.]+)%", card)
    assert found
    return float(found[1]) / 100


@pytest.mark.slow
def test_the_cards_accuracy_holds_on_a_sample(backbone: Backbone) -> None:
    figures, _ = measure.accuracy(backbone, 20)
    # 80 images: three standard errors are 17 %.
    assert abs(figures["strict"] - card_accuracy(backbone.name)) < 0.17


@pytest.fixture(scope="module")
def pairs() -> dict[str, preference.Groups]:
    """Small groups of held-out prompts: rendered, and generated by a backbone."""
    source = Source(21, held_out=True)
    made = preference.generated(source, catalog.mini_sana(), 40, "cpu")
    return {"rendered": preference.rendered(source, 60), "generated": made}


@pytest.mark.parametrize("kind", ["rendered", "generated"])
@pytest.mark.parametrize("name", REWARDS)
def test_a_reward_agrees_with_the_verifier(pairs: dict[str, preference.Groups], name: str, kind: str) -> None:
    reward = load_reward(name, load_backbone("mini-sana"))
    assert preference.agreement(reward, pairs[kind]) >= 0.8


@pytest.mark.parametrize("name", ["clip", *TUNED])
def test_a_rewards_card_gives_its_agreement_on_every_kind_of_pairs(name: str) -> None:
    card = (catalog.WEIGHTS / f"mini-{name}" / "README.md").read_text(encoding="utf-8")
    figures = {kind: float(value) for kind, value in re.findall(r"\| held-out pairs, ([\w-]+) \| ([\d.]+)% \|", card)}
    assert figures.keys() == {"rendered", *BACKBONES}
    assert min(figures.values()) >= 85


def test_an_uninformative_reward_has_no_agreement(pairs: dict[str, preference.Groups]) -> None:
    def blind(images: torch.Tensor, prompts: object, metadata: object) -> torch.Tensor:
        return torch.rand(len(images), generator=torch.Generator().manual_seed(0))

    assert 0.35 < preference.agreement(blind, pairs["rendered"]) < 0.65


def test_the_rewards_differ() -> None:
    backbone = load_backbone("mini-sana")
    images = torch.rand(8, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    scores = [load_reward(name, backbone)(images, ["a red circle"] * 8, [{}] * 8) for name in REWARDS]
    order = {tuple(score.argsort().tolist()) for score in scores}
    assert len(order) > 1
    assert len({load_reward(name, backbone).digest for name in REWARDS}) == len(REWARDS)  # type: ignore[attr-defined]


@pytest.mark.parametrize("folder", [catalog.WEIGHTS / name for name in LIMITS], ids=lambda path: path.name)
def test_there_is_a_model_card(folder: Path) -> None:
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "apache-2.0" in card.lower()
    assert "minis_recipe" in card
    assert re.search(r"\d+(\.\d+)? ?%", card)
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", card)
    assert len(pictures) >= (2 if folder.name in BACKBONES else 1)
    for picture in pictures:
        assert (folder / picture).is_file(), picture
