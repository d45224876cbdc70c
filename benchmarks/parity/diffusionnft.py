"""DiffusionNFT's loss, its gradient and figures, advantages and decays, against NVlabs/DiffusionNFT or NVlabs/Sana.

The release multiplies float32 predictions by float64 advantages; ours are float32 throughout, as in training.
"""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from solrl_trainer.algorithms.algorithm import Velocities, group_advantages
from solrl_trainer.algorithms.diffusionnft import DiffusionNft, DiffusionNftSettings
from solrl_trainer.algorithms.training_data import ForwardBatch
from solrl_trainer.policy.policy import average_decay, old_decay
from solrl_trainer.records.records import share_without_spread
from solrl_trainer.settings.training_sections import PolicySettings

from parity.published import Published, Values, normals, values_of

REPOSITORY = "https://github.com/NVlabs/DiffusionNFT"
_LOSS = ("scripts/train_nft_sd3.py", "train_scripts/sol_rl/train_sana.py")
_FUNCTIONS = ("scripts/train_nft_sd3.py", "train_scripts/sol_rl/train_utils.py")
_TRACKER = ("flow_grpo/stat_tracking.py", "diffusion/post_training/stat_tracking.py")
_AVERAGE = ("flow_grpo/ema.py", "diffusion/post_training/ema.py")

BETAS_CLIPS_WEIGHTS = ((1.0, 5.0, 1e-4), (0.1, 5.0, 1e-4), (2.0, 0.5, 1.0))
CASES: dict[str, Any] = {
    **{f"beta {case[0]:g}": case for case in BETAS_CLIPS_WEIGHTS},
    "": None,
}
"""beta, clip and KL weight; None for what is no loss."""
DECAYS = {
    0: PolicySettings(decay_max=0),
    1: PolicySettings(),
    2: PolicySettings(decay_flat=75, decay_rate=0.0075, decay_max=0.999),
}
"""The release's decay types as settings."""
COUNTS = (1, 2, 10, 74, 75, 76, 100, 208, 209, 499, 500, 501, 2000)


def ours(case: Any) -> Values:
    if case is None:
        return _our_others()
    beta, clip, weight = case
    inputs = fixed_inputs()
    settings = DiffusionNftSettings(beta=beta, adv_clip=clip, kl_weight=weight)
    v = inputs["v"].requires_grad_()
    batch = ForwardBatch(inputs["x_t"], inputs["t"], inputs["advantages"], inputs["x0"], inputs["noise"])
    fixed = {"old": inputs["v_old"], "reference": inputs["v_ref"]}
    loss = DiffusionNft(settings).loss(batch, Velocities(v, fixed))  # type: ignore[arg-type]
    return values_of(loss.value, v, {"kl": loss.figures["kl"], "old distance": loss.figures["old_distance"]})


def _our_others() -> Values:
    rewards = fixed_rewards()
    values: dict[str, torch.Tensor] = {"groups without spread": torch.tensor(share_without_spread(rewards))}
    for global_std in (True, False):
        values[f"advantages, global_std={global_std}"] = group_advantages(rewards, global_std=global_std)
    for kind, settings in DECAYS.items():
        values[f"decay type {kind}"] = torch.tensor([old_decay(count, settings) for count in COUNTS])
    return values | {"decay of the average": torch.tensor([average_decay(count, 0.9) for count in COUNTS])}


def theirs(published: Published, case: Any) -> Values:
    if case is None:
        return _their_others(published)
    beta, clip, weight = case
    inputs = fixed_inputs()
    train = SimpleNamespace(adv_clip_max=clip, adv_mode="all", beta=weight)
    samples = {"advantages": inputs["advantages"].double()[:, None]}
    v, t = inputs["v"].requires_grad_(), inputs["t"].view(-1, 1, 1, 1)
    names = {
        "torch": torch,
        "config": SimpleNamespace(beta=beta, train=train),
        "j_idx": 0,
        "x0": inputs["x0"],
        "xt": inputs["x_t"],
        "forward_prediction": v,
        "old_prediction": inputs["v_old"],
        "ref_forward_prediction": inputs["v_ref"],
        # The two repositories name these differently.
        **dict.fromkeys(("train_sample_batch", "train_batch"), samples),
        **dict.fromkeys(("t_expanded", "sigma_expanded"), t),
    }
    found = published.run_statements(_LOSS, "loss_terms", "loss_terms['total_loss']", names)
    terms = found["loss_terms"]
    return values_of(found["loss"], v, {"kl": terms["kl_div"], "old distance": terms["old_deviate"]})


def _their_others(published: Published) -> Values:
    rewards = fixed_rewards()
    prompts = [f"prompt {group}" for group in range(len(rewards)) for _ in rewards[group]]
    functions = published.definitions(_FUNCTIONS, ["return_decay", "calculate_zero_std_ratio"], {"np": np})
    ratio, _ = functions["calculate_zero_std_ratio"](prompts, {"avg": rewards.flatten().numpy()[:, None]})
    values: dict[str, torch.Tensor] = {"groups without spread": torch.tensor(ratio)}
    tracker = published.definitions(_TRACKER, ["PerPromptStatTracker"], {"np": np})["PerPromptStatTracker"]
    for global_std in (True, False):
        found = tracker(global_std).update(prompts, rewards.flatten().numpy())
        values[f"advantages, global_std={global_std}"] = torch.from_numpy(found)
    for kind in DECAYS:
        values[f"decay type {kind}"] = torch.tensor([functions["return_decay"](count, kind) for count in COUNTS])
    given: dict[str, Any] = {"torch": torch, "Iterable": Iterable}
    average = published.definitions(_AVERAGE, ["EMAModuleWrapper"], given)["EMAModuleWrapper"]([], decay=0.9)
    return values | {"decay of the average": torch.tensor([average.get_current_decay(count) for count in COUNTS])}


def fixed_inputs() -> dict[str, torch.Tensor]:
    """Velocities near the true one at six points, float32 [6, 2, 3, 3], and advantages on both sides of the clip."""
    x0, noise, *changes = normals(5, 6, 2, 3, 3).float()
    t = torch.tensor([1.0, 0.9, 0.7, 0.5, 0.3, 0.1])
    at = t.view(-1, 1, 1, 1)
    names = ("v", "v_old", "v_ref")
    velocities = {name: noise - x0 + 0.3 * change for name, change in zip(names, changes, strict=True)}
    advantages = torch.tensor([-7.0, -0.8, 0.0, 0.3, 2.0, 6.0])
    return velocities | {"x0": x0, "noise": noise, "t": t, "x_t": (1 - at) * x0 + at * noise, "advantages": advantages}


def fixed_rewards() -> torch.Tensor:
    """Rewards of five prompts [5, 6], one of them without spread."""
    rewards = torch.from_numpy(np.random.RandomState(1).standard_normal((5, 6))).float()
    rewards[3] = 0.25
    return rewards
