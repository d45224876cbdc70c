"""Rewards: (images, prompts, metadata) → scores. Loaded by name, entry point or `package.module:attribute`."""

from solrl_core.rewards.reward import Reward, RewardSet, load_reward

__all__ = ["Reward", "RewardSet", "load_reward"]
