"""Miniature preference rewards, each in the class of the real one and the file layout that its loader reads."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from solrl_core.rewards.blip import ImageRewardModel
from solrl_core.rewards.convert import open_clip_name
from transformers import AutoTokenizer, BlipConfig, CLIPConfig, CLIPModel, CLIPTokenizer

from minis_recipe.clip import normalize, processor
from minis_recipe.files import forget_origin, save_part
from minis_recipe.loop import Rates
from minis_recipe.tokenizers import CLIP_TOKENS, bert_tokenizer

Score = Callable[[torch.Tensor, dict[str, torch.Tensor]], torch.Tensor]


@dataclass(frozen=True)
class PreferenceReward:
    """A preference reward's architecture.

    Attributes:
        reward: registered name of the reward.
        build: folder of mini-clip, the initialisation → (model, tokenizer).
        score: model → (images, tokens) → scores in logits.
        save: writes (model, tokenizer) to a folder, in the layout of the reward's loader.
        rates: settings of the optimiser.
        standardize: sets the model's constants from the scores of training images, to mean 0 and deviation 1.
    """

    reward: str
    build: Callable[[Path], tuple[Any, Any]]
    score: Callable[[Any], Score]
    save: Callable[[Any, Any, Path], None]
    rates: Rates
    standardize: Callable[[Any, torch.Tensor], None] | None = None


def _mini_clip(folder: Path) -> tuple[CLIPModel, Any]:
    return CLIPModel.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


def _clip_score(model: CLIPModel) -> Score:
    def score(images: torch.Tensor, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
        image = model.get_image_features(pixel_values=normalize(images)).pooler_output
        text = model.get_text_features(**tokens).pooler_output
        scores: torch.Tensor = F.cosine_similarity(image.float(), text.float())
        return scores * torch.as_tensor(model.logit_scale).clamp(max=4.6052).exp()

    return score


def _save_pickscore(model: CLIPModel, tokenizer: Any, folder: Path) -> None:
    save_part(model, folder)
    processor(tokenizer).save_pretrained(folder)
    forget_origin(folder)


def _build_hpsv2(folder: Path) -> tuple[CLIPModel, Any]:
    """Build mini-clip with exact GELU and the start and end tokens last in the vocabulary, as in open_clip."""
    base, tokenizer = _mini_clip(folder)
    size = len(tokenizer)
    config = CLIPConfig.from_pretrained(folder)
    for part in (config.text_config, config.vision_config):
        part.hidden_act = "gelu"
    config.text_config.bos_token_id, config.text_config.eos_token_id = size - 2, size - 1
    config.text_config.pad_token_id = 0
    model = CLIPModel(config)
    weights = base.state_dict()
    embedding = "text_model.embeddings.token_embedding.weight"
    weights[embedding] = weights[embedding].roll(-2, 0)
    model.load_state_dict(weights)
    return model, _ends_last(tokenizer)


def _ends_last(tokenizer: Any) -> Any:
    """Copy of a CLIPTokenizer with the ids of start and end, 0 and 1, moved behind all others."""
    inner = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    size = len(inner["vocab"])
    vocabulary = {token: (index - 2) % size for token, index in inner["vocab"].items()}
    merges = [tuple(pair) for pair in inner["merges"]]
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=CLIP_TOKENS)


def open_clip_state(model: CLIPModel) -> dict[str, torch.Tensor]:
    """Weights of a CLIPModel in BF16, with open_clip's names and shapes."""
    state: dict[str, torch.Tensor] = {}
    thirds: dict[str, dict[Any, torch.Tensor]] = {}
    for name, tensor in model.state_dict().items():
        theirs, take = open_clip_name(name)
        weight = tensor.detach().to("cpu", torch.bfloat16)
        if take in (0, 1, 2):
            thirds.setdefault(theirs, {})[take] = weight
        else:
            state[theirs] = weight.T.contiguous() if take == "transposed" else weight
    return state | {name: torch.cat([parts[0], parts[1], parts[2]]) for name, parts in thirds.items()}


def _save_hpsv2(model: CLIPModel, tokenizer: Any, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"state_dict": open_clip_state(model)}, folder / "HPS_mini_compressed.pt")
    tokenizer.save_pretrained(folder)


def _build_imagereward(folder: Path) -> tuple[ImageRewardModel, Any]:
    """Build a BLIP whose image encoder is initialised from mini-clip's, as the real one's is from a trained BLIP."""
    tokenizer = bert_tokenizer(CLIP_TOKENS)
    common = {"hidden_size": 96, "num_attention_heads": 4}
    model = ImageRewardModel(
        BlipConfig(
            mlp_widths=[64, 16],
            vision_config={
                **common,
                "intermediate_size": 288,
                "num_hidden_layers": 6,
                "image_size": 64,
                "patch_size": 8,
                "layer_norm_eps": 1e-6,
            },
            text_config={
                **common,
                "intermediate_size": 192,
                "num_hidden_layers": 3,
                "encoder_hidden_size": 96,
                "vocab_size": len(tokenizer),
                "max_position_embeddings": CLIP_TOKENS,
                "is_decoder": True,
                "hidden_dropout_prob": 0.0,
                "attention_probs_dropout_prob": 0.0,
                "pad_token_id": tokenizer.pad_token_id,
                "bos_token_id": None,
                "eos_token_id": None,
                "sep_token_id": None,
            },
        )
    )
    for layer in model.mlp.modules():
        if isinstance(layer, torch.nn.Linear):
            torch.nn.init.xavier_uniform_(layer.weight)
    theirs = _mini_clip(folder)[0].vision_model
    ours = model.vision
    with torch.no_grad():
        ours.embeddings.class_embedding.copy_(theirs.embeddings.class_embedding[None, None])
        ours.embeddings.position_embedding.copy_(theirs.embeddings.position_embedding.weight[None])
        ours.embeddings.patch_embedding.weight.copy_(theirs.embeddings.patch_embedding.weight)
        for mine, other in zip(ours.encoder.layers, theirs.encoder.layers, strict=True):
            attention = other.self_attn
            for kind in ("weight", "bias"):
                parts = [getattr(getattr(attention, f"{name}_proj"), kind) for name in "qkv"]
                getattr(mine.self_attn.qkv, kind).copy_(torch.cat(parts))
            mine.self_attn.projection.load_state_dict(attention.out_proj.state_dict())
            for name in ("layer_norm1", "layer_norm2", "mlp"):
                getattr(mine, name).load_state_dict(getattr(other, name).state_dict())
        ours.post_layernorm.load_state_dict(theirs.post_layernorm.state_dict())
    return model, tokenizer


def _blip_score(model: ImageRewardModel) -> Score:
    def score(images: torch.Tensor, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
        rewards: torch.Tensor = model(normalize(images), tokens["input_ids"], tokens["attention_mask"])
        return rewards

    return score


def _standardize_imagereward(model: ImageRewardModel, scores: torch.Tensor) -> None:
    raw = scores * model.std + model.mean
    model.mean, model.std = float(raw.mean()), float(raw.std())
    model.config.reward_mean, model.config.reward_std = model.mean, model.std


def _save_imagereward(model: ImageRewardModel, tokenizer: Any, folder: Path) -> None:
    save_part(model, folder)
    tokenizer.save_pretrained(folder)


PICKSCORE = PreferenceReward("pickscore", _mini_clip, _clip_score, _save_pickscore, Rates(3e-4, average=0.99))
HPSV2 = PreferenceReward("hpsv2", _build_hpsv2, _clip_score, _save_hpsv2, Rates(5e-4, average=0.99))
IMAGEREWARD = PreferenceReward(
    "imagereward",
    _build_imagereward,
    _blip_score,
    _save_imagereward,
    Rates(1e-3, average=0.995),
    _standardize_imagereward,
)
