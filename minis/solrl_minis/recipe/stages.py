"""The stages that a miniature is made by, each of which reads what the one before left and returns its figures."""

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from solrl_core.rewards import load_reward

from solrl_minis.recipe import autoencoder, backbone, clip, measure, preference
from solrl_minis.recipe.data import Source
from solrl_minis.recipe.family import Family
from solrl_minis.recipe.files import load_autoencoder, load_pipeline, save_part, save_pipeline
from solrl_minis.recipe.judges import Judge
from solrl_minis.recipe.loop import Budget
from solrl_minis.recipe.tokenizers import clip_tokenizer


@dataclass(frozen=True)
class Setup:
    """Where the stages run and how much of them.

    Attributes:
        out: holds a folder for each miniature.
        device: where they run.
        scale: multiplies steps and pools and, below a twentieth, batches; below 1 for a trial.
        seconds: ends each training early.
        fast: whether backbones train compiled or recorded.
        mixed: whether they train in bfloat16 on a GPU.
        resume: whether a training goes on from what lies in `out`, where that can be.
        wrong_captions: in place of the table's.
    """

    out: Path
    device: str
    scale: float = 1.0
    seconds: float = math.inf
    fast: bool = False
    mixed: bool = True
    resume: bool = False
    wrong_captions: float | None = None

    def scaled(self, budget: Budget) -> Budget:
        """The budget of this run; a trial's floors are what a CPU is done with in seconds."""
        return replace(
            budget,
            steps=max(12, int(budget.steps * self.scale)),
            batch=max(4, int(budget.batch * min(1.0, 20 * self.scale))),
            pool=max(24, int(budget.pool * self.scale)),
            seconds=min(budget.seconds, self.seconds),
        )

    def count(self, count: int) -> int:
        """A scaled number of things to measure."""
        return max(2, int(count * min(1.0, 20 * self.scale)))


Stage = Callable[[Setup, str], dict[str, Any]]
"""(setup, the miniature's name) → figures."""


class Miniature(Protocol):
    """What can be made: its stages by name, in order."""

    @property
    def stages(self) -> dict[str, Stage]:
        """(setup, name) → figures, by the stage's name."""


@dataclass(frozen=True)
class MiniBackbone:
    """How a miniature pipeline is made.

    Attributes:
        family: its architecture.
        wrong_captions: share of captions with one attribute wrong: what is left for reinforcement learning to unlearn.
        autoencoder, backbone, aware: how long each stage trains; with None the last is left out.
        aware_wrong_captions: the same for the last.
        rounding: images that the rounding of weights looks at; with 0 it is left out.
        parts_from: the miniature whose autoencoder and text encoders this one takes, already trained.
    """

    family: Family
    wrong_captions: float
    autoencoder: Budget
    backbone: Budget
    aware: Budget | None = None
    aware_wrong_captions: float = 0.0
    rounding: int = 0
    parts_from: str | None = None

    @property
    def stages(self) -> dict[str, Stage]:
        """The autoencoder, text encoders and transformer, and what readies the transformer for NVFP4."""
        stages: dict[str, Stage] = {"autoencoder": self.train_autoencoder, "backbone": self.train_backbone}
        if self.aware is not None:
            stages["aware"] = self.train_aware
        if self.rounding:
            stages["rounding"] = self.round_weights
        return stages

    def train_autoencoder(self, setup: Setup, name: str) -> dict[str, Any]:
        """Stage 1."""
        if self.parts_from is not None:
            shutil.copytree(setup.out / self.parts_from / "vae", setup.out / name / "vae", dirs_exist_ok=True)
            return {"from": self.parts_from, "losses": []}
        model = self.family.build_autoencoder()
        losses = autoencoder.train(model, setup.scaled(self.autoencoder), setup.device)
        save_part(model, setup.out / name / "vae")
        return {"psnr_db": autoencoder.psnr(model.float(), setup.device, setup.count(512)), "losses": losses}

    def train_backbone(self, setup: Setup, name: str) -> dict[str, Any]:
        """Stage 2."""
        if setup.resume:
            pipeline = load_pipeline(setup.out / name)
        else:
            pipeline = self.family.build(load_autoencoder(setup.out / name, setup.device))
            if self.family.adopt is not None and self.parts_from is not None:
                self.family.adopt(pipeline, load_pipeline(setup.out / self.parts_from))
        return self._train(backbone.train, pipeline, setup, name, self.backbone, self.wrong_captions)

    def train_aware(self, setup: Setup, name: str) -> dict[str, Any]:
        """Stage 3 of SANA: the transformer learns to keep its course in NVFP4."""
        assert self.aware is not None
        pipeline = load_pipeline(setup.out / name)
        return self._train(backbone.train_aware, pipeline, setup, name, self.aware, self.aware_wrong_captions)

    def round_weights(self, setup: Setup, name: str) -> dict[str, Any]:
        """Stage 3 of the others: the weights are put where NVFP4 can hold them."""
        pipeline = load_pipeline(setup.out / name)
        backbone.round_weights(self.family, pipeline, max(4, int(self.rounding * min(1.0, 20 * setup.scale))))
        save_pipeline(pipeline, self.family, setup.out / name)
        figures, _ = measure.accuracy(measure.load(setup.out / name, setup.device), setup.count(128))
        return {**figures, "losses": []}

    def _train(
        self, train: Callable[..., list[float]], pipeline: Any, setup: Setup, name: str, budget: Budget, wrong: float
    ) -> dict[str, Any]:
        wrong = wrong if setup.wrong_captions is None else setup.wrong_captions
        losses = train(self.family, pipeline, setup.scaled(budget), wrong, setup.device, setup.fast, setup.mixed)
        save_pipeline(pipeline, self.family, setup.out / name)
        figures, _ = measure.accuracy(measure.load(setup.out / name, setup.device), setup.count(128))
        return {**figures, "wrong_captions": wrong, "steps": len(losses), "losses": losses}


@dataclass(frozen=True)
class MiniClip:
    """How mini-clip is made, which no preference has touched.

    Attributes:
        budget: how long it trains.
        made: combinations of which each backbone makes images.
    """

    budget: Budget
    made: int

    @property
    def stages(self) -> dict[str, Stage]:
        """One."""
        return {"contrastive": self.train}

    def train(self, setup: Setup, name: str) -> dict[str, Any]:
        """Contrast captions with rendered scenes, worn by mini-sana's autoencoder, and with what backbones made."""
        torch.manual_seed(0)
        tokenizer, budget = clip_tokenizer(), setup.scaled(self.budget)
        model = clip.build(tokenizer)
        autoencoder = load_autoencoder(setup.out / "mini-sana", setup.device)
        each = max(4, int(self.made * setup.scale))
        seen = clip.made(Source(3), preference.backbones(setup.out), each, setup.device)
        losses = clip.train(model, tokenizer, autoencoder, seen, budget, setup.device)
        save_part(model, setup.out / name)
        clip.processor(tokenizer).save_pretrained(setup.out / name)
        agreement = clip.agreement(model.float(), tokenizer, setup.device, setup.count(2000))
        return {"agreement": agreement, "steps": len(losses), "losses": losses}


@dataclass(frozen=True)
class MiniJudge:
    """How a preference reward is made.

    Attributes:
        judge: its architecture.
        budget: how long it is tuned; `pool` counts groups, half of them rendered, half made by the backbones.
    """

    judge: Judge
    budget: Budget

    @property
    def stages(self) -> dict[str, Stage]:
        """One."""
        return {"preference": self.train}

    def train(self, setup: Setup, name: str) -> dict[str, Any]:
        """Tune on preferences between images of one prompt."""
        torch.manual_seed(0)
        budget = setup.scaled(self.budget)
        model, tokenizer = self.judge.build(setup.out / "mini-clip")
        model.to(setup.device).train()
        source, folders = Source(len(name)), preference.backbones(setup.out)
        each = budget.pool // 2 // len(folders)
        groups = preference.join(
            [
                preference.rendered(source, budget.pool // 2),
                *(preference.generated(source, folder, each, setup.device) for folder in folders),
            ]
        )
        score, tokens = self.judge.score(model), clip.tokens(tokenizer, groups.prompts)
        losses = preference.train(
            self.judge.reward,
            list(model.parameters()),
            score,
            tokens,
            groups,
            budget,
            self.judge.rates,
            setup.device,
        )
        model.eval()
        if self.judge.standardize is not None:
            self.judge.standardize(model, preference.scores(score, tokens, groups, setup.device))
        self.judge.save(model, tokenizer, setup.out / name)
        return {**self.agreement(setup), "steps": len(losses), "losses": losses}

    def agreement(self, setup: Setup) -> dict[str, float]:
        """With the verifier on held-out pairs, rendered and generated."""
        return held_out_agreement(setup, self.judge.reward)


def held_out_agreement(setup: Setup, name: str) -> dict[str, float]:
    """A reward's agreement with the verifier on held-out pairs, rendered and by each backbone; all get the same."""
    source, folders = Source(9, held_out=True), preference.backbones(setup.out)
    reward = load_reward(name, measure.load(folders[0], setup.device))
    torch.manual_seed(9)  # of the noise on the worn ones
    figures = {"rendered": preference.agreement(reward, preference.rendered(source, setup.count(500)))}
    for folder in folders:
        groups = preference.generated(source, folder, setup.count(250), setup.device)
        figures[folder.name] = preference.agreement(reward, groups)
    return figures
