"""The rollout service of a run: reached, compared with what is loaded here, and asked under the run's versions."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from solrl_client.retries import OnWait, ignore
from solrl_client.rollouts import Restore, RolloutClient
from solrl_core.arithmetic import arithmetic
from solrl_core.families import Backbone
from solrl_core.fingerprint import fingerprint
from solrl_proto.models import ModelInfo
from solrl_proto.problems import Problem

from solrl_trainer.ranks.communicator import Communicator
from solrl_trainer.rollouts.plans import training_plan
from solrl_trainer.service.adapter_supply import LOST, AdapterSupply
from solrl_trainer.service.agreement import check_service, note_arithmetic, note_emulation
from solrl_trainer.service.regenerator import RegenerationSource
from solrl_trainer.service.reward_specs import reward_specs
from solrl_trainer.service.source import RolloutSource, rollout_source
from solrl_trainer.settings.config import RunConfig

FIRST_PATIENCE = 15.0
"""Seconds to try to reach the service before anything is loaded; a wrong address should be reported soon."""


@dataclass(frozen=True)
class ServiceConnection:
    """The service of a run.

    Attributes:
        source: the run's candidates.
        regeneration: the run's training samples; None if this device regenerates.
        supply: pushes adapters; only on rank 0.
    """

    source: RolloutSource
    regeneration: RegenerationSource | None
    supply: AdapterSupply | None


def rollout_client(
    config: RunConfig, world: Communicator, on_wait: OnWait = ignore
) -> AbstractContextManager[RolloutClient | None]:
    """A client of the run's service; None if this device explores."""
    if not config.uses_service:
        return nullcontext()
    # The other ranks ask again until rank 0 has pushed the versions that the service lost.
    awaited = LOST if world.rank else ()
    return RolloutClient(config.rollout_url, patience=config.patience, awaited=awaited, on_wait=on_wait)


def connect_service(
    config: RunConfig,
    client: RolloutClient,
    backbone: Backbone,
    digests: Mapping[str, str],
    world: Communicator,
    note: Callable[[str], None],
) -> ServiceConnection:
    """Compare a service with what is loaded here, and connect the run to it.

    Args:
        config: the run's settings.
        client: client of the service.
        backbone: the loaded model.
        digests: digests of all parts and rewards loaded here.
        world: ranks that train together.
        note: shows a line of text to the user.

    Raises:
        ProblemError: the service does not host the model or score a reward.
        MismatchError: noise contract or digests differ; names the part.
    """
    first = client.with_patience(FIRST_PATIENCE)
    served = first.model(config.model_name)
    check_service(first, config.model_name, reward_specs(config.served_rewards, config, served, digests), digests)
    emulated = [tier.precision for tier in served.precisions if tier.numerics == "emulated"]
    note_emulation(emulated, config.explore.precision, note)
    note_arithmetic(served, arithmetic(backbone.device), note)
    supply = None
    if world.rank == 0:
        supply = AdapterSupply(client, run=config.run, model=config.model_name, lag=config.explore.lag, note=note)
    source = rollout_source(
        config,
        client,
        rewards=reward_specs(config.trained, config, served, digests),
        fingerprint=fingerprint(digests, [spec.name for spec in config.trained]),
        numerics={tier.precision: tier.numerics for tier in served.precisions},
        restore=_restore(supply, world),
    )
    regenerates = config.regenerate.at == "service"
    regeneration = _regeneration(config, source, backbone, digests, served) if regenerates else None
    return ServiceConnection(source, regeneration, supply)


def _regeneration(
    config: RunConfig, source: RolloutSource, backbone: Backbone, digests: Mapping[str, str], served: ModelInfo
) -> RegenerationSource:
    rewards = reward_specs(config.served_rewards, config, served, digests)
    asked = replace(
        source,
        plan_of=lambda iteration: training_plan(config, config.regenerate.steps),
        rewards=rewards,
        fingerprint=fingerprint(digests, [spec.name for spec in rewards]),
    )
    exact = backbone.device.type == "cpu" and served.arithmetic == arithmetic(backbone.device)
    return RegenerationSource(asked, backbone.latent_shape, exact)


def _restore(supply: AdapterSupply | None, world: Communicator) -> Restore:
    """On rank 0, push again the versions that the service lost; other ranks ask rank 0 to, without waiting."""
    if supply is not None:
        world.on_notice(lambda text: supply.restore(Problem.model_validate_json(text)))
        return supply.restore

    def notify(problem: Problem) -> bool:
        if problem.kind in LOST:
            world.notify(problem.model_dump_json())
        return False

    return notify
