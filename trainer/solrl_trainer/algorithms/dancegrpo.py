"""DanceGRPO. Sources: Xue et al., arXiv 2505.07818, and its code, XueZeyue/DanceGRPO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from solrl_proto.rollouts import Eta, SdeKind

from solrl_trainer.algorithms.algorithm import centred
from solrl_trainer.algorithms.grpo import Grpo, GrpoSettings

if TYPE_CHECKING:
    import torch


class DanceGrpoSettings(GrpoSettings):
    """Settings of DanceGRPO, by default as in its FLUX.1 scripts."""

    global_std: bool = False
    sde: SdeKind = "dance"
    eta: Eta = 0.3


class DanceGrpo(Grpo[DanceGrpoSettings]):
    """Clipped ratios on a random part of the stochastic steps, without a KL divergence."""

    Settings = DanceGrpoSettings

    def advantages(self, rewards: torch.Tensor) -> torch.Tensor:
        """(r − mean of the prompt's kept rewards) / (unbiased standard deviation + 1e-8), [groups, kept].

        In float64, so that the mean of equal rewards is that reward.
        """
        exact = rewards.double()
        std = exact.std() if self.settings.global_std else exact.std(1, keepdim=True)
        return (centred(exact) / (std + 1e-8)).to(rewards.dtype)
