"""The shipped SANA with two of its five blocks, for runs that do not depend on what their images show."""

import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

from safetensors.torch import load_file, save_file
from solrl_core.families.load import locate

BLOCKS = 2
_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


@cache
def small_model() -> str:
    """Its folder, written once; it goes with this process. Services and runs call the model mini-sana, too."""
    _FOLDERS.append(tempfile.TemporaryDirectory(prefix="solrl-model-"))
    shipped, folder = Path(locate("mini-sana")), Path(_FOLDERS[-1].name, "mini-sana")
    shutil.copytree(shipped, folder)
    for other in shipped.parent.iterdir():  # its rewards
        if other != shipped:
            folder.with_name(other.name).symlink_to(other)
    config, file = folder / "transformer/config.json", folder / "transformer/diffusion_pytorch_model.safetensors"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_layers": BLOCKS}))
    kept = tuple(f"transformer_blocks.{i}." for i in range(BLOCKS))
    weights = load_file(file)
    save_file({k: v for k, v in weights.items() if k.startswith(kept) or not k.startswith("transformer_blocks.")}, file)
    return str(folder)
