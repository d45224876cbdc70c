"""Regeneration at a rollout service, which also scores the samples; this process repeats one of each iteration."""

import base64
import hashlib
import logging
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from solrl_client.answers import served_differently
from solrl_core.image_files import for_showing
from solrl_core.rewards.reward import weighted_sum
from solrl_engine.side_stream import Pending, in_background
from solrl_proto.noise import expand_seeds
from solrl_proto.problems import ProblemError, ProblemKind
from solrl_proto.rollouts import RewardTime, RolloutGroup

from solrl_trainer.rollouts.device_source import DeviceSource
from solrl_trainer.rollouts.groups import CandidateGroup, ScoredSamples, outermost
from solrl_trainer.rollouts.pairs import SHOWN_EACH, SHOWN_PROMPTS
from solrl_trainer.service.balance import Balance
from solrl_trainer.service.run_client import RunClient
from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.prompt_rewards import weights_of

logger = logging.getLogger(__name__)

TOLERANCE = 0.05
"""Largest difference of repeated latents, relative to their root mean square, if the arithmetic may differ: BF16 rounds
differently in a batch of another size, and later steps amplify that. About nine times the largest that was measured:
0.0056, FLUX.1 at 10 steps with random weights, on two H200s. Latents of different seeds differ by about 1.4."""
_AT_ONCE = 4
"""Requests in progress, each for one group, so that the service always has a next one."""


class ServiceRegenerator:
    """Has the service regenerate and score the selections of a share of the prompts; this device does the others.

    This device takes the first prompts, and each at its turn: while it does, the service makes the others.

    The version is always that of the iteration, which was pushed before it began. Of each iteration, one latent of the
    service, drawn from the run's seed, is generated here, too. If it differs, the run stops.
    """

    def __init__(
        self, config: RunConfig, client: RunClient, device: DeviceSource, balance: Balance, *, exact: bool
    ) -> None:
        """Set up a regenerator.

        Args:
            config: the run's settings.
            client: asks for the plan of regeneration and all rewards of the run.
            device: this device, with the behaviour policy merged.
            balance: number of prompts that the service regenerates.
            exact: whether the service computes with the same arithmetic on a CPU, so that latents have the same bits.
        """
        self._config, self._client, self._device = config, client, device
        self._balance, self._exact = balance, exact
        self._largest = 0.0
        self._slots = threading.BoundedSemaphore(_AT_ONCE)

    def regenerate(
        self, selection: CandidateGroup, iteration: int, pushed: Pending[object] = lambda: None
    ) -> Pending[ScoredSamples]:
        """Samples of the selected seeds under the behaviour policy, which the service has once it is `pushed`."""
        config, device, models = self._config, self._device, self._device.models
        prompts = [prompt.id for prompt in device.own_prompts(iteration)]
        served = prompts[len(prompts) - self._balance.regenerate.served :]
        prompt, seeds = selection.prompt, selection.seeds

        def here() -> ScoredSamples:
            with self._balance.regenerate.timed():
                return device.regenerate([selection], iteration)()

        if prompt.id not in served:
            return here
        adapter = models.behaviour_digest

        def request() -> tuple[ScoredSamples, Mapping[str, RewardTime]]:
            pushed()
            with self._slots, self._balance.asking():
                return self.samples_of(selection, iteration, adapter)

        arriving = in_background(request, "solrl-regenerate")
        which, place = expand_seeds(config.seed, f"repeat/{iteration}", 2)
        repeats, place = prompt.id == served[which % len(served)], place % len(seeds)
        repeated = device.sampler.sample([prompt], [seeds[place]], decode=None).latents if repeats else None
        # Images are for the report, which rank 0 writes.
        decoded = models.world.rank == 0 and prompt.id in prompts[:SHOWN_PROMPTS]

        def arrived() -> ScoredSamples:
            with self._balance.waiting():
                samples, times = arriving()
            device.clock.add("samples", "service", times)
            if repeated is not None:
                self._compare(samples.latents[place], repeated[0].cpu(), selection, place)
            latents = samples.latents.to(models.backbone.device)
            shown = samples.images
            if decoded:
                shown = for_showing(models.generator.decode(outermost(latents, SHOWN_EACH))).cpu()
            return replace(samples, latents=latents, images=shown)

        return arrived

    def samples_of(
        self, selection: CandidateGroup, version: int, adapter: str
    ) -> tuple[ScoredSamples, Mapping[str, RewardTime]]:
        """Samples under `version`, whose adapter's file has the digest `adapter`, and the time of each reward.

        The samples have no images.

        Raises:
            ProblemError: refused or unreachable; 409 `served-differently`: the answer does not match the request.
        """
        answer = self._client.group_of(selection.prompt, selection.seeds, version)
        self._balance.regenerate.served_in(answer.seconds.generate + answer.seconds.reward)
        (group,) = answer.groups
        prompt, none = selection.prompt, torch.full((len(group.seeds),), torch.nan)
        rewards = {name: torch.tensor(group.rewards[name]) for name in group.rewards}
        shape = self._device.models.backbone.latent_shape
        latents = from_base64(group, shape, adapter=adapter, url=self._client.url)
        scores = weighted_sum(rewards, weights_of(prompt, self._config.rewards))
        rewards = {name: rewards.get(name, none) for name in self._config.rewards}
        return ScoredSamples(latents, torch.empty(0), None, scores, rewards), answer.seconds.rewards

    def _compare(self, served: torch.Tensor, repeated: torch.Tensor, selection: CandidateGroup, place: int) -> None:
        if torch.equal(served, repeated):
            return
        difference = float((served - repeated).norm() / repeated.norm())
        if not self._exact and difference <= TOLERANCE:
            if difference > 2 * self._largest:
                logger.info("latents of the service differ by rounding: %.2g of their root mean square", difference)
                self._largest = difference
            return
        raise ProblemError(
            ProblemKind.SERVED_DIFFERENTLY,
            f"the service at {self._client.url} regenerated other latents than this process does from the same seed",
            where=f"group {selection.prompt.id!r}: latents of seed {selection.seeds[place]}",
            got=f"latents that differ by {difference:.2g} of their root mean square",
            expected="the same bits, as on any CPU of this kind" if self._exact else f"at most {TOLERANCE}",
            action="look for other software or a faulty device on either machine; regenerate.at=trainer does without",
        )


def from_base64(group: RolloutGroup, shape: Sequence[int], *, adapter: str, url: str) -> torch.Tensor:
    """Decode the latents of a group without pruned candidates.

    Args:
        group: part of an answer that was checked against its request.
        shape: shape of one candidate's latents.
        adapter: digest of the adapter's file under which they must have been generated.
        url: URL of the service, for messages.

    Returns:
        float32 [N, *shape].

    Raises:
        ProblemError: 409 `served-differently`, naming the field.
    """
    assert group.latents is not None
    name, size = f"group {group.prompt_id!r}: latents", 4 * math.prod(shape)
    if group.latents.adapter != adapter:
        raise served_differently(url, f"{name}.adapter", group.latents.adapter, adapter)
    parts = []
    for value in group.latents.values:
        try:
            parts.append(base64.b64decode(value or "", validate=True))
        except ValueError:  # something else than base64
            parts.append(b"")
    for place, part in enumerate(parts):
        if len(part) != size:
            raise served_differently(url, f"{name}.values[{place}]", f"{len(part)} bytes", f"{size} bytes in base64")
    joined = b"".join(parts)
    if (digest := f"sha256:{hashlib.sha256(joined).hexdigest()}") != group.latents.digest:
        raise served_differently(url, f"{name}.digest", group.latents.digest, f"{digest}, of the values")
    latents = torch.frombuffer(bytearray(joined), dtype=torch.float32).view(len(parts), *shape)
    if not torch.isfinite(latents).all():
        raise served_differently(url, f"{name}.values", "a value that is not finite", "finite values")
    return latents
