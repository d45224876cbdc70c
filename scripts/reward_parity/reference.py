"""Computes reference scores with published code; run by `scripts/reward-parity`.

usage: python -m reward_parity.reference DATA TOKENIZER

HPSv2, HPSv3 and ImageReward are their packages; the aesthetic predictor is open_clip and its head, as published. Writes
reduced models with random weights in their formats, tokenizers, images, prompts and scores to DATA, and CLIP's full
vocabulary for transformers with hpsv2's token ids to TOKENIZER.
"""

import gzip
import importlib
import importlib.metadata
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from reward_parity.weights import randomise, save

SIDE, PATCH = 48, 8
SIZES = ((56, 83), (97, 50), (48, 48), (37, 101), (33, 20))
PROMPTS = (
    "a red fox jumping over a frozen river, golden hour, 35mm photograph",
    "Un café à Orléans — “l’été” naïve Ångström, ½ cup",
    "salt &amp; pepper &amp;lt;b&amp;gt;bold&amp;lt;/b&amp;gt; &#39;quoted&#39;  \n\t and   spaced",
    "the cafÃ© sign reads â€œopenâ€\x9d; ﬁve ＦＵＬＬ width",
    "一只猫坐在红色的椅子上 🐈‍⬛ ΟΔΥΣΣΕΥΣ İstanbul [ENC] don't we've 1234",
    "an extremely long prompt " + "that keeps describing the same tiny wooden house by the lake in more detail " * 9,
    "",
)


def main(data: Path, tokenizer: Path) -> None:
    """Compute and write all reference data."""
    import_torchvision()
    from reward_parity.hpsv3_reference import hpsv3_scores

    data.mkdir(parents=True, exist_ok=True)
    images = [photograph(height, width, seed) for seed, (height, width) in enumerate(SIZES)]
    scores = {
        **hpsv2_scores(images, data / "hpsv2"),
        **image_reward_scores(images, data / "imagereward"),
        "aesthetic": aesthetic_scores(images, data / "aesthetic"),
        **hpsv3_scores(images, PROMPTS, data / "hpsv3"),
    }
    packages = (
        "hpsv3",
        "hpsv2",
        "open_clip_torch",
        "image-reward",
        "timm",
        "transformers",
        "torch",
        "torchvision",
        "ftfy",
    )
    versions = {name: importlib.metadata.version(name) for name in packages}
    np.savez_compressed(
        data / "reference.npz",
        prompts=np.array(PROMPTS),
        versions=json.dumps(versions),
        **{f"image_{at}": image for at, image in enumerate(images)},
        **scores,
    )
    whole_vocabulary(tokenizer)


def import_torchvision() -> None:
    """Import torchvision, of which only the transforms, written in Python, are used.

    Its compiled operators match a single build of torch. With another build the import fails, because it registers
    shape functions for operators that do not exist. In that case, declare the operators without a body and retry.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]
        global boxes
        boxes = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            boxes.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        importlib.import_module("torchvision")


def bare_package(name: str, *inner: str) -> None:
    """Make a package's modules importable without running its __init__, which imports missing dependencies."""
    folder = importlib.util.find_spec(name).submodule_search_locations[0]
    for at in ("", *inner):
        package = f"{name}.{at}".rstrip(".")
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = [f"{folder}/{at}"]


def photograph(height: int, width: int, seed: int) -> np.ndarray:
    """Synthetic photograph, uint8 [H, W, 3]: gradients, hard edges, fine texture and noise."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j][..., None]
    tint = random.uniform(0.2, 0.9, (3, 3))
    image = tint[0] * (1 - y) + tint[1] * y
    image = np.where((x - random.uniform(0.2, 0.8)) ** 2 + (y - 0.5) ** 2 < 0.04, tint[2], image)
    image = image + 0.15 * np.sin(90 * x + 60 * y) * (y > 0.6) + 0.04 * random.standard_normal((height, width, 3))
    return (image.clip(0, 1) * 255).round().astype(np.uint8)


def hpsv2_scores(images: list[np.ndarray], folder: Path) -> dict[str, np.ndarray]:
    """Scores [images, prompts] computed as in hpsv2's img_score, with its own network and with open_clip's."""
    bare_package("hpsv2")
    import open_clip
    from hpsv2.src.open_clip import tokenizer as text
    from hpsv2.src.open_clip.model import CLIP
    from hpsv2.src.open_clip.transform import image_transform

    folder.mkdir(parents=True, exist_ok=True)
    merges = write_clip_tokenizer(folder / "tokenizer", small_merges())
    bpe = folder / "bpe.txt.gz"
    with gzip.open(bpe, "wt", encoding="utf-8") as file:
        file.write("\n".join(["#version: 0.2", *merges]))
    text._tokenizer = text.SimpleTokenizer(str(bpe))
    bpe.unlink()
    vision = {"layers": 2, "width": 16, "head_width": 8, "mlp_ratio": 2.0, "patch_size": PATCH, "image_size": SIDE}
    texts = {"context_length": 77, "vocab_size": 512 + len(merges) + 2, "width": 16, "heads": 2, "layers": 1}
    sizes = {"embed_dim": 20, "vision_cfg": vision, "text_cfg": texts}
    model = CLIP(**sizes, output_dict=True).eval()
    # With this seed no cosine is near zero, where a relative difference would be meaningless.
    randomise(model, 6)
    save(model, folder / "checkpoint.pt", wrapped=True)
    theirs = open_clip.CLIP(**sizes, output_dict=True).eval()
    theirs.load_state_dict(model.state_dict())
    preprocess = image_transform(SIDE, is_train=False, resize_longest_max=True)
    found = {"hpsv2": [], "open_clip": []}
    with torch.no_grad():
        tokens = text.tokenize(list(PROMPTS))
        for image in images:
            pixels = preprocess(Image.fromarray(image))[None]
            for name, network in (("hpsv2", model), ("open_clip", theirs)):
                out = network(pixels, tokens)
                found[name].append((out["image_features"] @ out["text_features"].T)[0].numpy())
    return {name: np.stack(rows) for name, rows in found.items()} | {"hpsv2_tokens": tokens.numpy().astype(np.int32)}


def image_reward_scores(images: list[np.ndarray], folder: Path) -> dict[str, np.ndarray]:
    """Scores [images, prompts] from ImageReward.score, one pair at a time."""
    bare_package("ImageReward", "models")
    module = importlib.import_module("ImageReward.ImageReward")
    from ImageReward.models.BLIP import blip, blip_pretrain, vit
    from transformers import BertTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    words = write_bert_tokenizer(folder / "tokenizer")
    med = {
        "hidden_act": "gelu",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "max_position_embeddings": 48,
        "layer_norm_eps": 1e-12,
        "vocab_size": words + 2,
        "pad_token_id": 0,
        "add_type_embeddings": False,
        "encoder_width": 16,
        "add_cross_attention": True,
        "model_type": "bert",
    }
    (folder / "med_config.json").write_text(json.dumps(med, indent=2) + "\n")

    def small_vit(*ignored: Any) -> tuple[nn.Module, int]:
        return vit.VisionTransformer(SIDE, PATCH, embed_dim=16, depth=1, num_heads=2, mlp_ratio=2.0), 16

    blip_pretrain.create_vit = small_vit
    blip.BertTokenizer = types.SimpleNamespace(
        from_pretrained=lambda _: BertTokenizer.from_pretrained(folder / "tokenizer")
    )
    model = module.ImageReward(str(folder / "med_config.json"))
    model.preprocess = module._transform(SIDE)
    model.blip.vision_proj, model.blip.text_proj = nn.Linear(16, 4), nn.Linear(16, 4)
    widths = (16, 20, 16, 12, 8, 1)
    a, b, c, d, e = (nn.Linear(i, o) for i, o in zip(widths, widths[1:]))  # noqa: B905, RUF007
    model.mlp.layers = nn.Sequential(a, nn.Dropout(0.2), b, nn.Dropout(0.2), c, nn.Dropout(0.1), d, e)
    randomise(model, 2)
    save(model, folder / "checkpoint.pt", wrapped=False)
    model.eval()
    with torch.no_grad():
        scores = [[model.score(prompt, Image.fromarray(image)) for prompt in PROMPTS] for image in images]
    tokens = model.blip.tokenizer(list(PROMPTS), padding="max_length", truncation=True, max_length=35).input_ids
    return {
        "imagereward": np.array(scores, dtype=np.float32),
        "imagereward_tokens": np.array(tokens, dtype=np.int32),
    }


def aesthetic_scores(images: list[np.ndarray], folder: Path) -> np.ndarray:
    """Scores [images] of CLIP's normalised image features by a head of linear layers and dropouts, as published."""
    import open_clip
    from open_clip.transform import image_transform

    vision = {"layers": 2, "width": 16, "head_width": 8, "mlp_ratio": 2.0, "patch_size": PATCH, "image_size": SIDE}
    texts = {"context_length": 8, "vocab_size": 8, "width": 16, "heads": 2, "layers": 1}
    clip = open_clip.CLIP(embed_dim=20, vision_cfg=vision, text_cfg=texts, quick_gelu=True).eval()
    randomise(clip, 3)
    write_clip_vision(clip.visual, folder / "clip")
    head = AestheticHead(20)
    randomise(head, 4)
    save(head.eval(), folder / "head.pth", wrapped=False)
    preprocess = image_transform(SIDE, is_train=False)
    with torch.no_grad():
        features = clip.encode_image(torch.stack([preprocess(Image.fromarray(image)) for image in images])).numpy()
        lengths = np.linalg.norm(features, 2, -1)
        lengths[lengths == 0] = 1
        return head(torch.from_numpy(features / lengths[:, None]))[:, 0].numpy()


class AestheticHead(nn.Module):
    """The published head, with its dropouts, at reduced widths."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(features, 32),
            nn.Dropout(0.2),
            nn.Linear(32, 16),
            nn.Dropout(0.2),
            nn.Linear(16, 12),
            nn.Dropout(0.1),
            nn.Linear(12, 8),
            nn.Linear(8, 1),
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Scores [N, 1] of features [N, width]."""
        return self.layers(features)


def write_clip_vision(visual: nn.Module, folder: Path) -> None:
    """Write an image encoder of open_clip in transformers' format, in float16."""
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPVisionConfig(**sizes, image_size=SIDE, patch_size=PATCH, projection_dim=20, hidden_act="quick_gelu")
    theirs = visual.state_dict()
    renamed = {
        "embeddings.class_embedding": theirs["class_embedding"],
        "embeddings.patch_embedding.weight": theirs["conv1.weight"],
        "embeddings.position_embedding.weight": theirs["positional_embedding"],
    }
    for kind in ("weight", "bias"):
        renamed |= {
            f"pre_layrnorm.{kind}": theirs[f"ln_pre.{kind}"],
            f"post_layernorm.{kind}": theirs[f"ln_post.{kind}"],
        }
        for at in range(config.num_hidden_layers):
            ours, block = f"encoder.layers.{at}", f"transformer.resblocks.{at}"
            parts = zip("qkv", theirs[f"{block}.attn.in_proj_{kind}"].chunk(3), strict=True)
            renamed |= {f"{ours}.self_attn.{name}_proj.{kind}": part.clone() for name, part in parts}
            pairs = {
                "self_attn.out_proj": "attn.out_proj",
                "layer_norm1": "ln_1",
                "layer_norm2": "ln_2",
                "mlp.fc1": "mlp.c_fc",
                "mlp.fc2": "mlp.c_proj",
            }
            renamed |= {f"{ours}.{name}.{kind}": theirs[f"{block}.{old}.{kind}"] for name, old in pairs.items()}
    weights = {f"vision_model.{name}": weight for name, weight in renamed.items()}
    model = CLIPVisionModelWithProjection(config)
    model.load_state_dict({**weights, "visual_projection.weight": theirs["proj"].T.contiguous()})
    model.half().save_pretrained(folder)


def small_merges() -> list[str]:
    """A few merges in CLIP's notation, which assemble some of the prompts' words from left to right."""
    merges: dict[str, None] = {}
    for word in (word for prompt in PROMPTS for word in prompt.lower().split()):
        if word.isascii() and word.isalpha():
            pieces = [*word[:-1], f"{word[-1]}</w>"]
            for at in range(1, len(pieces)):
                merges[f"{''.join(pieces[:at])} {pieces[at]}"] = None
    return list(merges)[:120]


def write_clip_tokenizer(folder: Path, merges: list[str]) -> list[str]:
    """Write the vocabulary that open_clip builds from merges, in transformers' format; returns the merges."""
    from hpsv2.src.open_clip.tokenizer import bytes_to_unicode

    folder.mkdir(parents=True, exist_ok=True)
    letters = list(bytes_to_unicode().values())
    pieces = [*letters, *(f"{letter}</w>" for letter in letters), *(merge.replace(" ", "") for merge in merges)]
    vocabulary = {piece: at for at, piece in enumerate([*pieces, "<|startoftext|>", "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "CLIPTokenizer", "model_max_length": 77}\n')
    return merges


def write_bert_tokenizer(folder: Path) -> int:
    """Write a small WordPiece vocabulary with BERT's special tokens; returns its size."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = sorted({letter for prompt in PROMPTS for letter in prompt.lower() if letter.isalnum()} | set("&;#,.“”½"))
    words = sorted({word for prompt in PROMPTS for word in prompt.lower().split() if word.isascii() and word.isalpha()})
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = dict.fromkeys([*special, *letters, *(f"##{letter}" for letter in letters), *words[::2]])
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "do_lower_case": true}\n')
    return len(pieces)


def whole_vocabulary(folder: Path) -> None:
    """Write CLIP's full vocabulary for transformers, and hpsv2's token ids of the prompts."""
    from hpsv2.src.open_clip import tokenizer as text

    with gzip.open(text.default_bpe(), "rt", encoding="utf-8") as file:
        merges = file.read().split("\n")[1 : 49152 - 256 - 2 + 1]
    write_clip_tokenizer(folder, merges)
    text._tokenizer = text.SimpleTokenizer()
    ids = text.tokenize(list(PROMPTS)).numpy().astype(np.int32)
    np.savez_compressed(folder / "ids.npz", ids=ids, prompts=np.array(PROMPTS))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
