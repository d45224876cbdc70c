"""What a run holds: model, rewards, policies, client; loaded once, and checked against the service."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from solrl_core.errors import MismatchError
from solrl_core.families import Backbone, load_backbone
from solrl_core.fingerprint import check_digests, fingerprint, model_digest, part_digests
from solrl_core.generator import Generator
from solrl_core.noise import check_noise_contract
from solrl_core.rewards import RewardSet
from solrl_proto.models import ModelInfo
from solrl_proto.problems import ProblemError, ProblemKind
from solrl_proto.rollouts import ModelBinding, Precision, PromptItem

from solrl_trainer.algorithms.registry import ALGORITHMS
from solrl_trainer.client import RolloutClient
from solrl_trainer.config import RunConfig
from solrl_trainer.explore import Explorer
from solrl_trainer.policy import Policy
from solrl_trainer.prompts import find_prompts, prompts_of_iteration, read_prompts
from solrl_trainer.rollouts import LocalRollouts, PromptsOf, Rollouts, ServiceRollouts
from solrl_trainer.update import Updater


@dataclass
class Session:
    """The parts of a run. `generator` is the BF16 one, with the behaviour policy merged while training."""

    config: RunConfig
    backbone: Backbone
    rewards: RewardSet
    generator: Generator
    policy: Policy
    optimizer: torch.optim.AdamW
    updater: Updater
    explorer: Explorer | None
    """Asks the service; None where the recipe has none."""
    rollouts: Rollouts
    train_prompts: list[PromptItem]
    test_prompts: list[PromptItem]

    @classmethod
    def open(cls, config: RunConfig, client: RolloutClient | None, note: Callable[[str], None]) -> "Session":
        """Load everything and refuse a service that differs from what is loaded here.

        Args:
            config: the run's settings.
            client: the service; None for recipes that roll out here.
            note: told what is worth a line.

        Raises:
            ProblemError: the service is not there or does not host the model.
            MismatchError: its noise contract or a part of its model differs (named).
            ValueError, OSError: model, reward or prompts cannot be loaded.
        """
        folder = find_prompts(config.prompts)
        train, test = read_prompts(folder, "train"), read_prompts(folder, "test")
        if client is not None:
            client.model(config.model_name)  # before anything large is loaded
        backbone = load_backbone(config.model, device=pick_device(config.device), revision=config.revision)
        rewards = RewardSet.load([*config.rewards, *config.evaluate.rewards], backbone, config.reward_options)
        generator = Generator(backbone, "bf16")
        explorer = None
        if client is not None:
            parts = part_digests(backbone.parts)
            check_bindings(config.bindings, model_digest(parts), config.model)
            digests = parts | rewards.digests()
            check_service(client, config, digests)
            warn_of_emulation(client.model(config.model_name), config.explore.precision, note)
            ours = fingerprint(digests, [spec.name for spec in config.trained])
            explorer = Explorer(client, config, ours, note)

        def prompts_of(iteration: int) -> list[PromptItem]:
            return prompts_of_iteration(train, config.explore.prompts, config.seed, iteration)

        rollouts = _rollouts(config, explorer, generator, rewards, prompts_of)
        settings = config.optimizer
        policy = Policy(backbone, config.lora, config.seed, checkpointing=settings.checkpointing)
        optimizer = torch.optim.AdamW(
            policy.parameters,
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            eps=settings.eps,
        )
        updater = Updater(
            backbone=backbone,
            policy=policy,
            optimizer=optimizer,
            algorithm=ALGORITHMS.find(config.algorithm.name)(config.algorithm),
            settings=settings,
            sigmas=backbone.sigmas(config.regenerate.steps),
            guidance=config.guidance,
            seed=config.seed,
        )
        return cls(
            config=config,
            backbone=backbone,
            rewards=rewards,
            generator=generator,
            policy=policy,
            optimizer=optimizer,
            updater=updater,
            explorer=explorer,
            rollouts=rollouts,
            train_prompts=train,
            test_prompts=test[: config.evaluate.prompts],
        )


def check_service(client: RolloutClient, config: RunConfig, digests: Mapping[str, str]) -> None:
    """Compare noise contract and digests before any work; `digests` are of all parts and rewards here.

    Raises:
        MismatchError: the noise contract or a digest differs (named).
        ProblemError: the service does not score a reward.
    """
    hosted = client.models()
    check_noise_contract(hosted.noise)
    model = client.model(config.model_name)
    wanted = [spec.name for spec in config.trained]
    missing = sorted(set(wanted) - set(model.rewards))
    if missing:
        raise ProblemError(
            ProblemKind.REWARD_NOT_LOADED,
            f"the service at {client.url} does not score {', '.join(missing)}",
            got=wanted,
            expected=sorted(model.rewards),
            action=f"start the service with --rewards {' '.join(sorted({*model.rewards, *missing}))}",
        )
    trained = {f"reward:{name}" for name in wanted}
    ours = {name: digest for name, digest in digests.items() if name in trained or not name.startswith("reward:")}
    check_digests(model.digests, ours)


def check_bindings(bindings: Sequence[ModelBinding], digest: str, model: str) -> None:
    """Refuse a plan or a solver that was calibrated or fitted for another model.

    Raises:
        MismatchError: naming both digests.
    """
    for bound in bindings:
        if bound.model != digest:
            raise MismatchError(
                "digests",
                f"the exploration plan was calibrated for another model than {model}",
                where="explore.calibrated_for.model",
                got=digest,
                expected=bound.model,
                action="run `solrl-train calibrate` for this model, or leave the plan out",
            )


def warn_of_emulation(model: ModelInfo, precision: Precision, note: Callable[[str], None]) -> None:
    """Note what it costs that the service emulates NVFP4, which is asked for by name."""
    emulated = [tier.precision for tier in model.precisions if tier.numerics == "emulated"]
    if precision == "nvfp4" and precision in emulated:
        note(
            "explore.precision=nvfp4: the service's device has no NVFP4 units and emulates them. That is slower than "
            "BF16 and holds a second copy of the adapted weights; explore.precision=auto takes the fastest native one"
        )


def _rollouts(
    config: RunConfig, explorer: Explorer | None, generator: Generator, rewards: RewardSet, prompts_of: PromptsOf
) -> Rollouts:
    if explorer is not None:
        return ServiceRollouts(explorer, generator, rewards, prompts_of, config)
    precision = "bf16" if config.explore.precision == "auto" else config.explore.precision
    own = generator if precision == generator.precision else Generator(generator.backbone, precision)
    return LocalRollouts(own, rewards, prompts_of, config)


def pick_device(name: str) -> str:
    """`auto` takes CUDA where there is one."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"
