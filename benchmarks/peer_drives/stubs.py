"""Stand-ins for the packages, models, prompts and rewards that peers' scripts need beside their own code."""

import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed
from diffusers import DiffusionPipeline
from tests.support.ports import free_port
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from peer_drives.models import loaded, named, reward_of
from peer_drives.turns import Turns, Work, timed_as

COMMON = (
    "wandb: logs nothing",
    "absl, ml_collections, imp: flags and configurations in a few lines",
    "from_pretrained: random weights, in float32 as diffusers loads them by default",
    "text encoders: states of the true shape",
    "prompts and rewards: the comparison's",
)
"""Replaced in every peer, and by what."""
WANDB = ("init", "define_metric", "log", "Image", "finish")
Batch = tuple[list[str], list[dict[str, Any]]]
"""Prompts, and metadata of each."""


class ConfigDict(dict[str, Any]):
    """A dictionary whose items are attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error

    __setattr__ = dict.__setitem__  # type: ignore[assignment]
    to_dict = dict.copy


def install() -> SimpleNamespace:
    """Put stand-ins in the place of packages, whether installed or not; returns the flags, which `main` reads."""
    flags = SimpleNamespace()
    settings = module("ml_collections", ConfigDict=ConfigDict)
    settings.config_flags = module("ml_collections.config_flags", DEFINE_config_file=lambda *_: None)
    module("absl", app=MagicMock(), flags=SimpleNamespace(FLAGS=flags, DEFINE_string=lambda *_: None))
    module("imp", load_source=load_source)
    module("wandb", **{name: MagicMock() for name in WANDB})
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "TQDM_DISABLE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return flags


def module(name: str, **attributes: Any) -> Any:
    """Make a module that can be imported by its name."""
    stub = sys.modules[name] = ModuleType(name)
    stub.__spec__ = ModuleSpec(name, None)
    vars(stub).update(attributes)
    return stub


def package(name: str, folder: Path) -> Any:
    """The package in a folder, without running its `__init__.py`."""
    return module(name, __path__=[str(folder)])


def load_source(name: str, path: str | Path) -> ModuleType:
    """Import a file of a clone."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    source = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(source)
    return source


class Stage:
    """The comparison's model, prompts and reward, in the forms in which peers' scripts load them.

    It also stands in for a pipeline's class.
    """

    def __init__(self, work: Work, turns: Turns) -> None:
        backbone = loaded(work)
        self.work, self.turns = work, turns
        self.size = backbone.height
        self.latents = {"latent_shape": backbone.latent_shape}
        self._encode = backbone.encode
        self._reward = reward_of(work, backbone)
        self.pipeline: DiffusionPipeline = backbone.pipeline
        self.pipeline.vae.to(memory_format=torch.contiguous_format).float()
        self.pipeline.transformer.float()

    def from_pretrained(self, *_: Any, **__: Any) -> DiffusionPipeline:
        return self.pipeline

    def embeddings(self, prompts: Sequence[str], *_: Any, **__: Any) -> tuple[Tensor, ...]:
        """States and pooled embedding of the prompts; with FLUX.1, the position ids of the states, too.

        With SANA, states and mask, and again in the place of the empty prompt's, which no guidance uses.
        """
        encoded = self._encode(prompts)
        if "mask" in encoded:
            return (encoded["states"], encoded["mask"]) * 2
        states, pooled = encoded["states"], encoded["pooled"]
        ids = [states.new_zeros(states.shape[1], 3)] if type(self.pipeline).__name__ == "FluxPipeline" else []
        return states, pooled, *ids

    def batches(self, each_turn: Callable[[], Sequence[Sequence[str]]]) -> Iterator[Batch]:
        """In the place of a data loader: waits for each turn, and has the batches of its prompts."""
        while True:
            self.turns.wait()
            for prompts in each_turn():
                yield list(prompts), [{} for _ in prompts]

    def multi_score(self, *_: Any) -> Callable[..., Any]:
        """In the place of a peer's rewards."""

        def score(images: Tensor, prompts: Sequence[str], metadata: Any, *_: Any, **__: Any) -> Any:
            scores = self._reward(images.float(), prompts, metadata)
            self.turns.scores += scores.tolist()
            return {"avg": scores}, {}

        return score

    def tracker(self, original: type[Any], samples: int) -> type[Any]:
        """A peer's class of advantages. Training begins once they are cleared, and lasts until the turn ends."""
        turns = self.turns

        class Tracker(original):  # type: ignore[misc]
            def clear(self) -> None:
                super().clear()
                turns.begin("train", samples)

        return Tracker

    def described(self, function: Callable[..., Any], pipeline: Callable[..., Any]) -> Callable[..., Any]:
        """A function that a peer calls while it samples; facts are read from the pipeline of its arguments."""

        def called(*args: Any, **kwargs: Any) -> Any:
            self.turns.facts |= facts(pipeline(*args))
            return function(*args, **kwargs)

        return called


class Nothing:
    """In the place of a peer's data set and its sampler."""

    collate_fn = None

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def set_epoch(self, epoch: int) -> None: ...


def facts(pipeline: Any) -> dict[str, Any]:
    """How a peer's pipeline samples, and its transformer trains."""
    transformer = pipeline.transformer
    base = next(weight for name, weight in transformer.named_parameters() if "lora" not in name)
    kind = base.device.type
    return {
        "compiled": "whole" if hasattr(transformer, "_orig_mod") else "no",
        "weights": named(base.dtype),
        "autocast": named(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else "none",
        "recomputed": "every block" if recomputes(transformer) else "no block",
        "decoder": named(pipeline.vae.dtype),
    }


def recomputes(transformer: nn.Module) -> bool:
    """Whether it has blocks that recompute their activations: diffusers' and SANA's own have flags for it."""
    flags = ("gradient_checkpointing", "grad_checkpointing")
    return any(getattr(layer, flag, False) for layer in transformer.modules() for flag in flags)


def on_cpu(script: Any) -> None:
    """Let a script that needs CUDA and NCCL run on a CPU."""
    script.torch = Without(torch, device=lambda _: torch.device("cpu"), cuda=MagicMock())
    script.DDP = lambda model, **_: DistributedDataParallel(model)
    script.torch_autocast = partial(torch.autocast, "cpu")
    script.GradScaler = partial(torch.amp.GradScaler, "cpu")
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    script.setup_distributed = lambda *_: None
    torch.distributed.ReduceOp.AVG = torch.distributed.ReduceOp.SUM  # gloo has no AVG; of one rank they are equal


class Without:
    """A module, with other attributes of these names."""

    def __init__(self, original: ModuleType, **attributes: Any) -> None:
        vars(self).update(attributes)
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def run_sd3(script: Any, config: Any, flags: Any, stage: Stage, batches: Sequence[Sequence[str]]) -> None:
    """Run `main` of Flow-GRPO's script for SD3, or of DiffusionNFT's, which descends from it.

    Args:
        script: the imported script.
        config: its settings.
        flags: the stub of absl's flags.
        stage: model, prompts and reward.
        batches: prompts of each batch of a turn, all of one size.
    """
    turns, batch = stage.turns, len(batches[0])
    config.resolution = stage.size
    script.StableDiffusion3Pipeline = stage
    script.compute_text_embeddings = stage.embeddings
    script.TextPromptDataset = script.DistributedKRepeatSampler = Nothing
    script.DataLoader = lambda *_, **__: stage.batches(lambda: batches)
    script.PerPromptStatTracker = stage.tracker(script.PerPromptStatTracker, batch * len(batches))
    sampler = timed_as("sample", turns, batch, script.pipeline_with_logprob)
    script.pipeline_with_logprob = stage.described(sampler, lambda pipeline: pipeline)
    levels = int(config.sample.num_steps * config.train.timestep_fraction)
    turns.facts |= {"levels": levels, "sampled at once": batch, "trained at once": batch}
    with tempfile.TemporaryDirectory() as folder:
        config.save_dir = config.logdir = folder
        flags.config = config
        script.main(None)
