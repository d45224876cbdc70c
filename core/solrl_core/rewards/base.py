"""The one shape of a reward, its registry, and a set of rewards summed by weight."""

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

import torch

from solrl_core.errors import RewardError
from solrl_core.families.base import Backbone
from solrl_core.fingerprint import source_digest

GROUP = "solrl.rewards"

Reward = Callable[[torch.Tensor, Sequence[str], Sequence[Mapping[str, Any]]], torch.Tensor]
"""(images [N, 3, H, W] float32 in [0, 1], N prompts, N metadata) → N float32 scores.

One may carry a `digest` attribute ("sha256:…") over its weights; without it, its source code is digested.
"""


def _clipscore(**options: Any) -> Reward:
    from solrl_core.rewards.clipscore import ClipScore

    return ClipScore(**options)


def _pickscore(**options: Any) -> Reward:
    from solrl_core.rewards.pickscore import PickScore

    return PickScore(**options)


def _hpsv2(**options: Any) -> Reward:
    from solrl_core.rewards.hpsv2 import HpsV2

    return HpsV2(**options)


def _imagereward(**options: Any) -> Reward:
    from solrl_core.rewards.imagereward import ImageReward

    return ImageReward(**options)


# Each imports transformers only when it is asked for.
_BUILT_IN: dict[str, Callable[..., Reward]] = {
    "clipscore": _clipscore,
    "hpsv2": _hpsv2,
    "imagereward": _imagereward,
    "pickscore": _pickscore,
}


def is_built_in(name: str) -> bool:
    """Whether it is a reward of ours, which needs no metadata."""
    return name in _BUILT_IN


def known_rewards() -> list[str]:
    """Names that `load_reward` takes without a colon."""
    return sorted({*_BUILT_IN, *(entry.name for entry in entry_points(group=GROUP))})


def load_reward(name: str, backbone: Backbone, options: Mapping[str, Any] | None = None) -> Reward:
    """Load a reward on the backbone's device.

    A built-in reward takes options: weights (`model`, `checkpoint`, `processor`), `dtype`, `batch_size`, another
    `device`. Those given here win over those of the model's `solrl.json`; without any it loads its usual hub id.

    Raises:
        ValueError: nothing is registered under the name and it is not `package.module:attribute`, or a built-in
            reward's options, weights or tokenizer are wrong.
        OSError: a built-in reward's files are missing.
    """
    if name in _BUILT_IN:
        given = _options(name, backbone, options)
        try:
            return _BUILT_IN[name](**given)
        except TypeError as error:
            raise ValueError(f"cannot load reward {name!r} with options {sorted(given)}: {error}") from error
        except (ValueError, OSError) as error:
            kind = OSError if isinstance(error, OSError) else ValueError
            raise kind(f"cannot load reward {name!r}: {error}") from error
    if options:
        raise ValueError(f"got options {sorted(options)} for reward {name!r}; only {sorted(_BUILT_IN)} take options")
    for entry in entry_points(group=GROUP):
        if entry.name == name:
            loaded: Reward = entry.load()
            return loaded
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            found: Reward = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"cannot load reward {name!r}: {error}") from error
        return found
    raise ValueError(f"got reward {name!r}; expected one of {known_rewards()}, or package.module:attribute")


def _options(name: str, backbone: Backbone, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """All options of a reward on a backbone's device, which none but built-in rewards take."""
    if name not in _BUILT_IN:
        return dict(options or {})
    return {"device": str(backbone.device), **backbone.options.rewards.get(name, {}), **(options or {})}


class RewardSet:
    """Loaded rewards by name; scores images with each and checks what comes back."""

    def __init__(self, rewards: Mapping[str, Reward]) -> None:
        self._rewards = dict(rewards)

    @classmethod
    def load(
        cls,
        names: Sequence[str],
        backbone: Backbone,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        loaded: dict[str, Reward] | None = None,
    ) -> "RewardSet":
        """Load each name once; `options` are by name, see `load_reward`.

        `loaded` holds what other models have loaded. What this one needs likewise is taken from there, what it
        loads itself is added.

        Raises:
            ValueError, OSError: as `load_reward`; also options for a reward that is not named.
        """
        wanted, given = list(dict.fromkeys(names)), dict(options or {})
        if not given.keys() <= set(wanted):
            raise ValueError(f"got options for rewards {sorted(given)}; expected some of those loaded: {wanted}")
        shared = {} if loaded is None else loaded
        rewards = {}
        for name in wanted:
            key = json.dumps([name, _options(name, backbone, given.get(name))], sort_keys=True, default=str)
            if key not in shared:
                shared[key] = load_reward(name, backbone, given.get(name))
            rewards[name] = shared[key]
        return cls(rewards)

    @property
    def names(self) -> tuple[str, ...]:
        """The rewards' names."""
        return tuple(self._rewards)

    def digests(self) -> dict[str, str]:
        """`reward:<name>` → digest of each."""
        return {
            f"reward:{name}": getattr(reward, "digest", None) or source_digest(reward)
            for name, reward in self._rewards.items()
        }

    def score(
        self,
        names: Sequence[str],
        images: torch.Tensor,
        prompts: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
    ) -> dict[str, torch.Tensor]:
        """Score images [N, 3, H, W] with the named rewards; each value is float32 [N] on the CPU.

        Raises:
            KeyError: a name that was not loaded.
            RewardError: a reward failed, or gave a wrong shape or a non-finite score; names reward and image.
            torch.OutOfMemoryError: the device's memory ran out.
        """
        scores = {}
        for name in names:
            reward = self._rewards[name]
            try:
                values = reward(images, prompts, metadata).float().cpu()
            except torch.OutOfMemoryError:
                raise  # fewer images at a time may do
            except Exception as error:
                at = _first_failing(reward, images, prompts, metadata)
                which = f"{len(images)} images" if at is None else f"image {at} of prompt {prompts[at]!r}"
                raise RewardError(name, f"failed on {which}: {error}") from error
            if values.shape != (len(images),):
                raise RewardError(name, f"gave shape {tuple(values.shape)}; expected ({len(images)},)")
            bad = (~torch.isfinite(values)).nonzero()
            if len(bad):
                at = int(bad[0])
                raise RewardError(name, f"gave {values[at]} for image {at} of prompt {prompts[at]!r}")
            scores[name] = values
        return scores


def _first_failing(
    reward: Reward, images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
) -> int | None:
    """Index of the first image that fails alone as well; None if only the whole does (too many, say)."""
    for at in range(len(images)):
        one = slice(at, at + 1)
        try:
            reward(images[one], prompts[one], metadata[one]).float()
        except Exception:
            return at
    return None


def weighted_sum(scores: Mapping[str, torch.Tensor], weights: Mapping[str, float]) -> torch.Tensor:
    """Sum of raw scores times weights, over the names in `weights`."""
    return torch.stack([scores[name] * weight for name, weight in weights.items()]).sum(0)
