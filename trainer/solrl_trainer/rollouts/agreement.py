"""Checks before a run that service, trainer and exploration plan are of the same model."""

from collections.abc import Callable, Mapping, Sequence

from solrl_core.errors import MismatchError
from solrl_core.fingerprint import check_digests
from solrl_core.noise import check_noise_contract
from solrl_proto.models import ModelInfo
from solrl_proto.problems import ProblemError, ProblemKind
from solrl_proto.rollouts import ModelBinding, Precision, RewardSpec

from solrl_trainer.client import RolloutClient


def check_service(client: RolloutClient, model: str, rewards: Sequence[RewardSpec], digests: Mapping[str, str]) -> None:
    """Compare noise contract, rewards and digests with a service's, before any work.

    Args:
        client: of the service.
        model: its name at the service.
        rewards: that the service must score.
        digests: of all parts and rewards loaded here.

    Raises:
        ProblemError: the service does not host the model or score a reward.
        MismatchError: noise contract or digests differ; names the part.
    """
    hosted = client.models()
    check_noise_contract(hosted.noise)
    found = client.model(model)
    wanted = [spec.name for spec in rewards]
    missing = sorted(set(wanted) - set(found.rewards))
    if missing:
        raise ProblemError(
            ProblemKind.REWARD_NOT_LOADED,
            f"the service at {client.url} does not score {', '.join(missing)}",
            got=wanted,
            expected=sorted(found.rewards),
            action=f"start the service with --rewards {' '.join(sorted({*found.rewards, *missing}))}",
        )
    scored = {f"reward:{name}" for name in wanted}
    ours = {name: digest for name, digest in digests.items() if name in scored or not name.startswith("reward:")}
    check_digests(found.digests, ours)


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


def note_emulation(model: ModelInfo, precision: Precision, note: Callable[[str], None]) -> None:
    """Note the cost of NVFP4, requested by name, on a service that emulates it."""
    emulated = [tier.precision for tier in model.precisions if tier.numerics == "emulated"]
    if precision == "nvfp4" and precision in emulated:
        note(
            "explore.precision=nvfp4: the service's device has no NVFP4 units and emulates them. That is slower than "
            "BF16 and holds a second copy of the adapted weights; explore.precision=auto takes the fastest native one"
        )
