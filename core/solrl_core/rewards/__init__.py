"""Rewards: (images, prompts, metadata) → scores, found by name, by `package.module:attribute`, or by entry point."""

from solrl_core.rewards.base import Reward, RewardSet, load_reward

__all__ = ["Reward", "RewardSet", "load_reward"]
