"""SANA for Sol-RL's train_sana.py: its layers are theirs; what their packages import beside the layers is replaced."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import yaml

from peer_drives.stubs import Stage, module, package

STUBS = (
    "with SANA, mmcv, and diffusion/model/builder.py, which imports video models: a registry in a few lines",
    "with SANA, diffusion/model/nets/__init__.py, which imports video models: nothing",
    "with SANA, its logger, timm.data, and Triton layers that its settings do not choose: nothing is computed",
    "with SANA, the checkpoint: none; the layers keep the random weights that they begin with",
)


class Registry:
    """Makes what is registered under a name."""

    def __init__(self, *_: str) -> None:
        self._makers: dict[str, Callable[..., Any]] = {}

    def register_module(self) -> Callable[[Any], Any]:
        return lambda maker: self._makers.setdefault(maker.__name__, maker)

    def build(self, cfg: Mapping[str, str], default_args: Mapping[str, Any]) -> Any:
        return self._makers[cfg["type"]](**default_args)


def install(clone: Path) -> None:
    """Put stand-ins in the place of packages that SANA's layers import."""
    os.environ["DISABLE_XFORMERS"] = "1"  # as run_sana_single_node_8gpu.sh
    package("diffusion.model.nets", clone / "diffusion/model/nets")
    module("diffusion.model.nets.fastlinear.modules", TritonLiteMLA=None, TritonMBConvPreGLU=None)
    module("diffusion.model.builder", MODELS=Registry())
    module("diffusion.utils.dist_utils", get_rank=lambda: 0)
    module("diffusion.utils.logger", get_root_logger=MagicMock())
    module("mmcv", Registry=Registry)
    module("timm.data", __getattr__=lambda _: None)  # it imports torchvision
    module("tools")
    module("tools.download", find_model=lambda _: {})


def native_config(settings: Path, script: Any, stage: Stage, folder: str) -> str:
    """The file of the model's settings, written to a folder. On a CPU, the model gets the miniature's shape."""
    native = yaml.safe_load(settings.read_text())
    native["work_dir"] = folder
    if stage.work.device == "cpu":
        config, of_settings = stage.pipeline.transformer.config, script.model_init_config
        shape = {
            "depth": config.num_layers,
            "hidden_size": config.num_attention_heads * config.attention_head_dim,
            "linear_head_dim": config.attention_head_dim,
            "num_heads": config.num_cross_attention_heads,
            **{name: config[name] for name in ("caption_channels", "mlp_ratio", "patch_size")},
        }
        script.model_init_config = lambda *args, **kwargs: of_settings(*args, **kwargs) | shape
        native["model"]["model"] = "SanaMSLinearFFN"
        native["vae"]["vae_latent_dim"] = config.in_channels
    path = Path(folder) / "native.yaml"
    path.write_text(yaml.safe_dump(native))
    return str(path)
