"""The reward interface, and sets of rewards combined by a weighted sum."""

import asyncio
import copy
import inspect
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import torch
from solrl_proto.scores import MAX_ANSWER_SECONDS

from solrl_core.devices import require_device, resolve_device
from solrl_core.errors import PromptError, RewardError, described
from solrl_core.fingerprint import combined_digest, source_digest
from solrl_core.model_options import ModelOptions
from solrl_core.reward_registry import REWARDS
from solrl_core.rewards.call import calling, checked_scores, copies, first_failing, is_interrupt, state_put_back
from solrl_core.rewards.frames import TAKES_CLIPS, FrameRule, frame_rule
from solrl_core.rewards.loading import batches, dtype_named
from solrl_core.suggestions import did_you_mean

logger = logging.getLogger(__name__)

Reward = Callable[[torch.Tensor, Sequence[str], Sequence[Mapping[str, Any]]], torch.Tensor]
"""(images [N, 3, H, W] float32 in [0, 1], N prompts, N metadata) → N float32 scores.

The arguments are copies; the reward may write to them. Random states, the working directory, and torch's default dtype,
default device, gradient mode and number of threads are put back after each call. If calls overlap in threads, as when
a stalled reward returns late, during the next batch, each may see and undo what the other changes of these states.

For a model that makes clips, a reward with the attribute `takes_clips = True` gets them whole, [N, F, 3, H, W]; any
other gets frames, see `FrameRule`.

A reward may have a `digest` attribute ("sha256:…") over its weights and options. Without it, the digest is over the
whole file that defines the reward and, for a class, over its options. Optional attributes:

- `checks_prompts` (a decorator) marks a reward that demands something of a prompt's text or metadata.
- `costs`: numbers by kind that only grow, such as {"requests": 12}, of a reward that asks a paid service.
- `max_latency_s`: most seconds of a call, of a reward that waits for another service.
- `parameters`: number of weights on the device, for memory plans.
- `sources(options)`: each `RewardFile` that these options load; `doctor` looks for them.
- `unread_tokens(text)`: number of a text's tokens that a reward does not read.
"""

RewardT = TypeVar("RewardT", bound=Callable[..., Any])
_PROMPT_CHECK = "check_prompt"


def checks_prompts(check: Callable[[str, Mapping[str, Any]], object]) -> Callable[[RewardT], RewardT]:
    """Decorate a reward that demands something of prompts, so that unsuitable ones are found before anything is loaded.

    Args:
        check: raises ValueError for a text and metadata that the reward cannot judge by, at best a `PromptError` with
            the field. A stranger may choose both, so numbers that become loops or sizes must be bounded here.
    """

    def mark(reward: RewardT) -> RewardT:
        # As a class's own method, it would be called with the reward, too.
        setattr(reward, _PROMPT_CHECK, staticmethod(check) if isinstance(reward, type) else check)
        return reward

    return mark


def require_judgeable(reward: Any, text: str, metadata: Mapping[str, Any]) -> None:
    """Raise PromptError if a reward cannot score images of this prompt; takes a loaded reward or its class."""
    check = getattr(reward, _PROMPT_CHECK, None)
    try:
        if check is not None:
            check(text, copy.deepcopy(metadata))
    except PromptError:
        raise
    except ValueError as error:
        raise PromptError(str(error)) from error
    except Exception as error:
        raise PromptError(f"its check fails: {described(error)}") from error


def require_all_judgeable(rewards: Mapping[str, Any], prompts: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Refuse the first prompt that one of the rewards cannot judge by.

    Raises:
        PromptError: names the reward; `where` begins with the prompt's number, such as `3.metadata.text`.
    """
    for index, (text, metadata) in enumerate(prompts):
        for name, reward in rewards.items():
            try:
                require_judgeable(reward, text, metadata)
            except PromptError as error:
                fields = error.fields | {"where": f"{index}.{error.where}" if error.where else str(index)}
                raise PromptError(f"reward {name!r} cannot judge by the prompt: {error.detail}", **fields) from None


def prompt_fault(reward: Any, text: str, metadata: Mapping[str, Any]) -> str | None:
    """The reason of `require_judgeable` to refuse a prompt; None if there is none."""
    try:
        require_judgeable(reward, text, metadata)
    except PromptError as error:
        return str(error)
    return None


def first_fault(reward: Any, prompts: Iterable[tuple[str, Mapping[str, Any]]]) -> str | None:
    """`prompt_fault` of the first text and metadata that has one, with the prompt."""
    for text, metadata in prompts:
        if fault := prompt_fault(reward, text, metadata):
            return f"of prompt {text!r}, {fault}"
    return None


RewardConnector = Callable[[str, Mapping[str, Any]], Reward]
"""(name, options with `at`) → the reward that the server at that address computes. Core itself uses no network."""

AT = "at"
"""Option with the address of a reward server."""

OnScored = Callable[[str, float], None]
"""Called with a reward and the seconds that it took."""

_NO_VALUES = ("device", "dtype", "batch_size")
"""Options that change scores by rounding only, and digests not at all."""

_ADDRESSES = (AT, "endpoint")
"""Options that say where images are sent."""


class RewardDefaults(Protocol):
    """A model's defaults for its rewards. Every backbone has them."""

    @property
    def device(self) -> torch.device:
        """The device that rewards run on."""

    @property
    def options(self) -> ModelOptions:
        """The model's `solrl.json`; its `rewards` apply."""


@dataclass(frozen=True)
class PlainDefaults:
    """Defaults without a backbone."""

    device: torch.device
    options: ModelOptions = field(default_factory=ModelOptions)


def load_reward(
    name: str,
    model: RewardDefaults,
    options: Mapping[str, Any] | None = None,
    connect: RewardConnector | None = None,
    dtype: str | None = None,
) -> Reward:
    """Load a reward on the model's device, or connect to the server at its option `at`.

    A class is constructed with `device` and its options. A built-in reward's options are its weights (`model`,
    `checkpoint`, `processor`), `dtype` and `batch_size`. `options` override the options in the model's
    `solrl.json`, and both override `dtype`. Without options for its weights, a built-in reward loads its default hub
    id.

    Options with `at` are all for the connection. A model's `solrl.json` can give neither `at` nor `endpoint`: a
    downloaded model must not choose where images are sent.

    Raises:
        ValueError: no such reward, or its options, weights or tokenizer are invalid.
        OSError: files are missing.
    """
    if options and AT in options:
        if connect is None:
            raise ValueError(
                f"got reward {name!r} at {options[AT]!r}; this program scores with rewards of its own only"
            )
        return connect(name, dict(options))
    if option := next((option for option in _ADDRESSES if option in model.options.rewards.get(name, {})), None):
        raise ValueError(
            f"the model's solrl.json gives {option!r} for reward {name!r}: a model must not choose where images are "
            "sent; delete it there, and give the address among the options of rewards"
        )
    arguments = _options(name, model, options)
    check_reward(name, arguments)
    _, arguments = _frame_rule(name, arguments)
    kind = REWARDS.find(name)
    if isinstance(kind, type):
        takes_dtype = dtype is not None and "dtype" in inspect.signature(kind).parameters
        arguments = {"device": str(model.device), **({"dtype": dtype} if takes_dtype else {}), **arguments}
        if name in REWARDS.built_in:
            arguments["device"] = resolve_device(arguments["device"])
    with state_put_back():
        loaded: Reward = REWARDS.make(name, arguments)
    if isinstance(kind, type) and getattr(loaded, "digest", None) is None and (values := _values(kind, arguments)):
        object.__setattr__(loaded, "digest", combined_digest(source_digest(loaded), values))  # it may be frozen
    return loaded


def _values(kind: type, options: Mapping[str, Any]) -> str:
    """All options of a class that may change its scores, options at their defaults included; empty without any."""
    bound = inspect.signature(kind).bind(**options)
    bound.apply_defaults()
    options = {name: value for name, value in bound.arguments.items() if name not in _NO_VALUES}
    values = {name: float(value) if type(value) is int else value for name, value in options.items()}
    return json.dumps(values, sort_keys=True, default=repr) if values else ""


def check_reward(name: str, options: Mapping[str, Any], *, all_given: bool = True) -> None:
    """Import a reward, and refuse options that `load_reward` would refuse, if that shows without loading its weights.

    Its server checks options with `at`. `all_given`: these are all, the options of the model's `solrl.json` included.

    Raises:
        ValueError: no such reward, or an option is unknown, lacking or invalid.
    """
    if AT in options:
        return
    with state_put_back():
        kind = REWARDS.find(name)
    _, options = _frame_rule(name, options)
    device = {"device": "cpu"} if isinstance(kind, type) else {}
    REWARDS.check_options(name, {**device, **options}, all_given=all_given)
    if name in REWARDS.built_in:
        try:
            dtype_named(options.get("dtype", "float32"))
            batches(0, options.get("batch_size", 1))
            require_device(options.get("device", "cpu"))
            getattr(kind, "sources", tuple)(options)
        except (ValueError, TypeError) as error:
            raise ValueError(f"cannot load reward {name!r}: {error}") from error


def check_named(options: Iterable[str], names: Iterable[str]) -> None:
    """Refuse options of rewards that are not loaded."""
    choices = list(names)
    if unknown := sorted(set(options) - set(choices)):
        hint = did_you_mean(unknown[0], choices)
        raise ValueError(f"got options for reward {unknown[0]!r}{hint}; expected some of the loaded rewards: {choices}")


def _frame_rule(name: str, options: Mapping[str, Any]) -> tuple[FrameRule, dict[str, Any]]:
    """The frame rule in a reward's options, and the other options. A reward that takes clips has no frame rule."""
    if AT in options or getattr(REWARDS.find(name), TAKES_CLIPS, False):
        return FrameRule(), dict(options)
    return frame_rule(options)


def _options(name: str, model: RewardDefaults, options: Mapping[str, Any] | None) -> dict[str, Any]:
    return {**model.options.rewards.get(name, {}), **(options or {})}


class RewardSet:
    """Loaded rewards by name. Scores images with several rewards and validates the scores."""

    def __init__(self, rewards: Mapping[str, Reward], rules: Mapping[str, FrameRule] | None = None) -> None:
        self._rewards = dict(rewards)
        self._rules = dict(rules or {})

    @classmethod
    def load(
        cls,
        names: Sequence[str],
        model: RewardDefaults,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        sources: Mapping[str, str] | None = None,
        loaded: dict[str, Reward] | None = None,
        connect: RewardConnector | None = None,
        dtype: str | None = None,
    ) -> "RewardSet":
        """Load each named reward once.

        Args:
            names: rewards to load; repeated names load once.
            model: the model whose device and `solrl.json` apply.
            options: reward name → options, see `load_reward`.
            sources: reward name → registered name or `package.module:attribute`, where that is not the name itself.
            loaded: cache shared between models. Rewards with the same options are taken from it, new ones added.
            connect: connects to the servers of rewards with the option `at`.
            dtype: number format of the weights of rewards that take one and are given none; None for their own.

        Raises:
            ValueError: no such reward, its options, weights or tokenizer are invalid, or options of a reward that is
                not named.
            OSError: files are missing.
        """
        unique_names, by_name = list(dict.fromkeys(names)), dict(options or {})
        check_named(by_name, unique_names)
        shared = {} if loaded is None else loaded
        rewards, rules = {}, {}
        for name in unique_names:
            source = (sources or {}).get(name, name)
            identity = [source, str(model.device), dtype, _options(source, model, by_name.get(name))]
            key = json.dumps(identity, sort_keys=True, default=str)
            if key not in shared:
                shared[key] = load_reward(source, model, by_name.get(name), connect, dtype)
            rewards[name] = shared[key]
            rules[name], _ = _frame_rule(source, _options(source, model, by_name.get(name)))
        return cls(rewards, rules)

    def joined(self, additions: Mapping[str, Reward]) -> "RewardSet":
        """These rewards and further ones, which replace rewards of equal names."""
        return RewardSet({**self._rewards, **additions}, {k: v for k, v in self._rules.items() if k not in additions})

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the rewards, in loading order."""
        return tuple(self._rewards)

    @property
    def computed_here(self) -> tuple[str, ...]:
        """Names of the rewards that no server computes."""
        return tuple(name for name, reward in self._rewards.items() if getattr(reward, AT, None) is None)

    def takes_clips(self, name: str) -> bool:
        """Whether a reward gets clips whole."""
        return bool(getattr(self._rewards[name], TAKES_CLIPS, False))

    def unread_tokens(self, name: str, texts: Sequence[str]) -> list[int]:
        """Number of tokens of each text that a reward does not read; 0 if it does not say."""
        count = getattr(self._rewards[name], "unread_tokens", None)
        return [0] * len(texts) if count is None else [count(text) for text in texts]

    def server(self, name: str) -> str | None:
        """Host and port of the server that computes a reward, without user or path; None if this process does."""
        at = getattr(self._rewards[name], AT, None)
        return None if at is None else urlsplit(at).netloc.rpartition("@")[2]

    def costs(self) -> dict[str, dict[str, int]]:
        """Numbers of the rewards that count what they use of other services, such as tokens, by reward and kind."""
        return {name: dict(reward.costs) for name, reward in self._rewards.items() if hasattr(reward, "costs")}

    def max_latency_s(self, name: str) -> float | None:
        """Seconds that a reward's scores may take, at most a day; None if it does not wait for another service."""
        seconds: float | None = getattr(self._rewards[name], "max_latency_s", None)
        return min(seconds, MAX_ANSWER_SECONDS) if seconds else None

    def first_fault(self, name: str, prompts: Iterable[tuple[str, Mapping[str, Any]]]) -> str | None:
        """Why a reward cannot judge one of the (text, metadata) pairs; None if it can judge all, or has no check."""
        return first_fault(self._rewards[name], prompts)

    def require_judgeable(self, names: Iterable[str], prompts: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """As `require_all_judgeable`, for the named rewards."""
        require_all_judgeable({name: self._rewards[name] for name in names}, prompts)

    def digests(self) -> dict[str, str]:
        """Digest of each reward, by `reward:<name>`."""
        digests = {}
        for name, reward in self._rewards.items():
            digest, rule = getattr(reward, "digest", None) or source_digest(reward), self._rule(name)
            digests[f"reward:{name}"] = digest if rule == FrameRule() else combined_digest(digest, repr(tuple(rule)))
        return digests

    def score(
        self,
        names: Sequence[str],
        images: torch.Tensor,
        prompts: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
        on_scored: OnScored = lambda name, seconds: None,
    ) -> dict[str, torch.Tensor]:
        """Score images [N, 3, H, W] or clips [N, F, 3, H, W] with the named rewards; float32 [N] on the CPU for each.

        Each image has a prompt and metadata, see `Reward`. `on_scored` is called after each reward.

        Raises:
            KeyError: a name that was not loaded.
            RewardError: a reward failed, or returned something other than a finite number per image; names reward and
                image. The log has the traceback of a failure.
            RewardUnavailableError: a reward's server gave no usable answer.
            torch.OutOfMemoryError: the device is out of memory.
        """
        scores = {}
        for name in names:
            reward, began = self._rewards[name], time.monotonic()
            try:
                inputs = self._inputs_of(name, images, prompts, metadata)
                with calling():
                    returned = reward(*copies(*inputs))
                scores[name] = self._scores_per_image(name, returned, inputs[1], len(images))
            except torch.OutOfMemoryError:
                raise  # the caller may retry with fewer images
            except RewardError:
                raise  # also of a server; its error has the reason
            except BaseException as error:  # a reward's package may end its thread, or the program by sys.exit
                if is_interrupt(error):
                    raise
                index = first_failing(reward, *inputs)
                which = f"{len(inputs[1])} images" if index is None else f"image {index} of prompt {inputs[1][index]!r}"
                logger.error("reward %r failed on %s", name, which, exc_info=error)
                raise RewardError(name, f"failed on {which}: {described(error)}") from error
            on_scored(name, time.monotonic() - began)
        return scores

    async def ask(
        self,
        names: Sequence[str],
        images: torch.Tensor,
        prompts: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
        on_scored: OnScored = lambda name, seconds: None,
    ) -> dict[str, torch.Tensor]:
        """Score as `score` does, by rewards that servers compute. One without `ask` of its own has a thread."""
        scores: dict[str, torch.Tensor] = {}
        for name in names:
            began, ask = time.monotonic(), getattr(self._rewards[name], "ask", None)
            if ask is None:
                scores |= await asyncio.to_thread(self.score, [name], images, prompts, metadata, on_scored)
            else:
                inputs = self._inputs_of(name, images, prompts, metadata)
                scores[name] = self._scores_per_image(name, await ask(*copies(*inputs)), inputs[1], len(images))
                on_scored(name, time.monotonic() - began)
        return scores

    def _rule(self, name: str) -> FrameRule:
        return self._rules.get(name, FrameRule())

    def _inputs_of(
        self, name: str, images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> tuple[torch.Tensor, Sequence[str], Sequence[Mapping[str, Any]]]:
        """What a reward gets of images or clips."""
        if images.ndim == 4 or self.takes_clips(name):
            return images, prompts, metadata
        return self._rule(name).frames_of(images, prompts, metadata)

    def _scores_per_image(self, name: str, returned: Any, prompts: Sequence[str], count: int) -> torch.Tensor:
        """Scores [count] of images or clips, from what a reward returned for the images or frames that it got."""
        scores = checked_scores(name, returned, prompts)
        return scores if len(scores) == count else self._rule(name).joined(scores, count)


def weighted_sum(scores: Mapping[str, torch.Tensor], weights: Mapping[str, float | torch.Tensor]) -> torch.Tensor:
    """Weighted sum of raw scores, over the names in `weights`, which broadcast.

    Raises:
        OverflowError: a sum is beyond float32.
    """
    total = torch.stack([scores[name] * weight for name, weight in weights.items()]).sum(0)
    if not torch.isfinite(total).all():
        raise OverflowError(
            f"the weighted sum of the rewards overflows at the weights {dict(weights)}; expected a sum within float32: "
            "use smaller weights"
        )
    return total
