"""Training stages of the miniatures. Each stage reads the files of the one before and returns its figures."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from solrl_core.rewards import load_reward
from solrl_minis.judge import Detector, Judge, save

from minis_recipe import autoencoder, backbone, clip, detection, measure, preference
from minis_recipe.data import Source
from minis_recipe.family import Family
from minis_recipe.files import load_autoencoder, load_pipeline, save_part, save_pipeline
from minis_recipe.loop import Budget
from minis_recipe.preference_rewards import PreferenceReward
from minis_recipe.tokenizers import clip_tokenizer


@dataclass(frozen=True)
class Setup:
    """Output folder, device and scale of a run of the recipe.

    Attributes:
        out: output folder, with one folder per miniature.
        device: device of all stages.
        scale: factor on steps and pools, and below 1/20 also on batch sizes; below 1 for a trial.
    """

    out: Path
    device: str
    scale: float = 1.0

    def scaled(self, budget: Budget) -> Budget:
        """Scale a budget for this run, down to a minimum that takes a CPU a few seconds."""
        return replace(
            budget,
            steps=max(12, int(budget.steps * self.scale)),
            batch=max(4, int(budget.batch * min(1.0, 20 * self.scale))),
            pool=max(24, int(budget.pool * self.scale)),
        )

    def count(self, count: int) -> int:
        """Scale a number of samples to measure."""
        return max(2, int(count * min(1.0, 20 * self.scale)))


Stage = Callable[[Setup, str], dict[str, Any]]
"""(setup, name of the miniature) → figures."""


@dataclass(frozen=True)
class MiniBackbone:
    """Training of a miniature pipeline.

    Attributes:
        family: architecture.
        wrong_captions: share of captions with one attribute wrong, left for reinforcement learning to correct.
        autoencoder, backbone, aware: budget of each stage; None skips the stage `aware`.
        aware_wrong_captions: share of wrong captions in the stage `aware`.
        rounding: number of images for the rounding of weights; 0 skips it.
        parts_from: miniature whose trained autoencoder and text encoders this one uses.
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
        """Autoencoder; text encoders with transformer; preparation of the transformer for NVFP4."""
        stages: dict[str, Stage] = {"autoencoder": self.train_autoencoder, "backbone": self.train_backbone}
        if self.aware is not None:
            stages["aware"] = self.train_aware
        if self.rounding:
            stages["rounding"] = self.round_weights
        return stages

    def train_autoencoder(self, setup: Setup, name: str) -> dict[str, Any]:
        """Stage 1: train the autoencoder, or copy it."""
        if self.parts_from is not None:
            shutil.copytree(setup.out / self.parts_from / "vae", setup.out / name / "vae", dirs_exist_ok=True)
            return {"from": self.parts_from, "losses": []}
        model = self.family.build_autoencoder()
        losses = autoencoder.train(model, setup.scaled(self.autoencoder), setup.device, self.family.source)
        save_part(model, setup.out / name / "vae")
        return {
            "psnr_db": autoencoder.psnr(model.float(), setup.device, setup.count(512), source=self.family.source),
            "losses": losses,
        }

    def train_backbone(self, setup: Setup, name: str) -> dict[str, Any]:
        """Stage 2: train text encoders and transformer by flow matching."""
        model = load_autoencoder(setup.out / name, setup.device)
        torch.manual_seed(0)  # text encoders may stay as they are drawn
        pipeline = self.family.build(model)
        if self.family.adopt is not None and self.parts_from is not None:
            self.family.adopt(pipeline, load_pipeline(setup.out / self.parts_from))
        return self._train(backbone.train, pipeline, setup, name, self.backbone, self.wrong_captions)

    def train_aware(self, setup: Setup, name: str) -> dict[str, Any]:
        """Stage 3 of SANA: quantisation-aware fine-tuning of the transformer."""
        assert self.aware is not None
        pipeline = load_pipeline(setup.out / name)
        return self._train(backbone.train_aware, pipeline, setup, name, self.aware, self.aware_wrong_captions)

    def round_weights(self, setup: Setup, name: str) -> dict[str, Any]:
        """Stage 3 of the other families: rounding of the weights to the NVFP4 grid."""
        pipeline = load_pipeline(setup.out / name)
        backbone.round_weights(self.family, pipeline, max(4, int(self.rounding * min(1.0, 20 * setup.scale))))
        save_pipeline(pipeline, self.family, setup.out / name)
        figures, _ = self.family.accuracy(measure.load(setup.out / name, setup.device), setup.count(128))
        return {**figures, "losses": []}

    def _train(
        self, train: Callable[..., list[float]], pipeline: Any, setup: Setup, name: str, budget: Budget, wrong: float
    ) -> dict[str, Any]:
        losses = train(self.family, pipeline, setup.scaled(budget), wrong, setup.device)
        save_pipeline(pipeline, self.family, setup.out / name)
        figures, _ = self.family.accuracy(measure.load(setup.out / name, setup.device), setup.count(128))
        return {**figures, "wrong_captions": wrong, "steps": len(losses), "losses": losses}


@dataclass(frozen=True)
class MiniClip:
    """Training of mini-clip, which uses no preferences.

    Attributes:
        budget: budget of the training.
        generated: number of combinations of which each backbone generates images.
    """

    budget: Budget
    generated: int

    @property
    def stages(self) -> dict[str, Stage]:
        """Contrastive training."""
        return {"contrastive": self.train}

    def train(self, setup: Setup, name: str) -> dict[str, Any]:
        """Train on rendered scenes, degraded by mini-sana's autoencoder, and on images that the backbones generate."""
        torch.manual_seed(0)
        tokenizer, budget = clip_tokenizer(), setup.scaled(self.budget)
        model = clip.build(tokenizer)
        autoencoder = load_autoencoder(setup.out / "mini-sana", setup.device)
        each = max(4, int(self.generated * setup.scale))
        groups = clip.generate(Source(3), preference.backbones(setup.out), each, setup.device)
        losses = clip.train(model, tokenizer, autoencoder, groups, budget, setup.device)
        save_part(model, setup.out / name)
        clip.processor(tokenizer).save_pretrained(setup.out / name)
        agreement = clip.agreement(model.float(), tokenizer, setup.device, setup.count(2000))
        return {"agreement": agreement, "steps": len(losses), "losses": losses}


@dataclass(frozen=True)
class MiniReward:
    """Training of a preference reward.

    Attributes:
        kind: architecture.
        budget: budget of the training; `pool` counts groups, half of them rendered, half generated.
    """

    kind: PreferenceReward
    budget: Budget

    @property
    def stages(self) -> dict[str, Stage]:
        """Preference training."""
        return {"preference": self.train}

    def train(self, setup: Setup, name: str) -> dict[str, Any]:
        """Train on preferences between images of the same prompt."""
        torch.manual_seed(0)
        budget = setup.scaled(self.budget)
        model, tokenizer = self.kind.build(setup.out / "mini-clip")
        model.to(setup.device).train()
        source, folders = Source(len(name)), preference.backbones(setup.out)
        each = budget.pool // 2 // len(folders)
        groups = preference.join(
            [
                preference.rendered(source, budget.pool // 2),
                *(preference.generated(source, folder, each, setup.device) for folder in folders),
            ]
        )
        score, tokens = self.kind.score(model), clip.tokens(tokenizer, groups.prompts)
        losses = preference.train(
            self.kind.reward,
            list(model.parameters()),
            score,
            tokens,
            groups,
            budget,
            self.kind.rates,
            setup.device,
        )
        model.eval()
        if self.kind.standardize is not None:
            self.kind.standardize(model, preference.scores(score, tokens, groups, setup.device))
        self.kind.save(model, tokenizer, setup.out / name)
        return {**held_out_agreement(setup, self.kind.reward), "steps": len(losses), "losses": losses}


@dataclass(frozen=True)
class MiniJudge:
    """Training of the judge, which uses neither a verifier nor a reward nor a generated image.

    Attributes:
        budget: budget of the training.
    """

    budget: Budget

    @property
    def stages(self) -> dict[str, Stage]:
        """Training of its detector."""
        return {"detection": self.train}

    def train(self, setup: Setup, name: str) -> dict[str, Any]:
        """Train on scenes, drawn anew at each step, and measure on held-out ones."""
        torch.manual_seed(0)
        detector = Detector()
        losses = detection.train(detector, setup.scaled(self.budget), setup.device)
        save(detector, setup.out / name)
        figures = detection.accepted(Judge(str(setup.out / name), device=setup.device), setup.count(500))
        return {**figures, "steps": len(losses), "losses": losses}


Miniature = MiniBackbone | MiniClip | MiniReward | MiniJudge
"""A miniature, with its training stages by name, in order."""


def held_out_agreement(setup: Setup, name: str) -> dict[str, float]:
    """Agreement of a reward with the verifier on held-out pairs, rendered and by backbone; the same for all rewards."""
    source, folders = Source(9, held_out=True), preference.backbones(setup.out)
    reward = load_reward(name, measure.load(folders[0], setup.device))
    torch.manual_seed(9)  # for the noise on degraded images
    figures = {"rendered": preference.agreement(reward, preference.rendered(source, setup.count(500)))}
    for folder in folders:
        groups = preference.generated(source, folder, setup.count(250), setup.device)
        figures[folder.name] = preference.agreement(reward, groups)
    return figures
