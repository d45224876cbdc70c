"""Writes an ImageReward of full size with random weights; run by `scripts/reward-server-parity`.

usage: python -m reward_parity.full_size FOLDER

It is built by the package itself. The tokenizer has a small vocabulary, because BERT's is not in any package.
"""

import json
import sys
from pathlib import Path

import ImageReward as published  # noqa: N813
from reward import bert_tokenizer_of

from reward_parity.reference import write_bert_tokenizer
from reward_parity.weights import randomise, save

MED_CONFIG = {
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 0,
    "add_type_embeddings": False,
    "vocab_size": 30524,
    "encoder_width": 768,
    "add_cross_attention": True,
}
"""Settings of the published checkpoint's text encoder."""


def main(folder: Path) -> None:
    """Write the checkpoint, its settings and a tokenizer."""
    write_bert_tokenizer(folder / "tokenizer")
    settings = folder / "med_config.json"
    settings.write_text(json.dumps(MED_CONFIG, indent=2) + "\n")
    with bert_tokenizer_of(str(folder / "tokenizer")):
        model = published.ImageReward(str(settings))
    randomise(model, 0)
    save(model, folder / "checkpoint.pt", wrapped=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
