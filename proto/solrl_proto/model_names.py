"""Names of models: a registered name, a folder, a hub id, or `FILE.safetensors+` one of these."""

import re

CHECKPOINT = ".safetensors"
"""End of a single-file checkpoint's name."""


def split_checkpoint(model: str) -> tuple[str | None, str]:
    """Split `FILE.safetensors+MODEL` into file and model; (None, text) for a text without a file."""
    file, plus, base = model.partition(f"{CHECKPOINT}+")
    return (f"{file}{CHECKPOINT}", base) if plus else (None, model)


def default_model_name(model: str) -> str:
    """The default name of a model at a service: the last part of its name, checkpoint, folder or hub id."""
    last = (split_checkpoint(model)[0] or model).rstrip("/").rpartition("/")[2].lower().removesuffix(CHECKPOINT)
    return re.sub(r"[^a-z0-9._-]", "-", last)[:64].strip("._-") or "model"
