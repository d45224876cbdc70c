"""Checks and warnings before a run: digests of service and trainer, bindings of plans, decoders, emulation."""

from collections.abc import Callable, Collection, Mapping, Sequence

from solrl_client.rollouts import RolloutClient
from solrl_core.arithmetic import differences
from solrl_core.errors import MismatchError
from solrl_core.families import Backbone
from solrl_core.families.decoder_fp8 import fp8_convolutions
from solrl_core.fingerprint import check_digests
from solrl_core.sampling.noise import check_noise_contract
from solrl_proto.identifiers import Tier
from solrl_proto.models import ModelInfo
from solrl_proto.printable import printable
from solrl_proto.rollouts import DecoderPrecision, ModelBinding, Precision, RewardSpec

from solrl_trainer.service.problems import require_rewards


def check_service(client: RolloutClient, model: str, rewards: Sequence[RewardSpec], digests: Mapping[str, str]) -> None:
    """Compare noise contract, rewards and digests with a service's, before the run starts.

    Args:
        client: client of the service.
        model: name of the model at the service.
        rewards: rewards that the service must score, as requests name them.
        digests: digests of all parts and rewards loaded here.

    Raises:
        ProblemError: the service does not host the model or score a reward.
        MismatchError: noise contract or digests differ; names the part.
    """
    hosted = client.models()
    check_noise_contract(hosted.noise)
    found = client.model(model)
    require_rewards(client.url, hosted, found, rewards)
    # Requests name the digests of the others.
    scored = {f"reward:{spec.name}" for spec in rewards if spec.at is None}
    ours = {name: digest for name, digest in digests.items() if name in scored or not name.startswith("reward:")}
    check_digests(found.digests, ours)


def check_bindings(bindings: Sequence[ModelBinding], digest: str, model: str) -> None:
    """Refuse a plan or a solver that was calibrated or fitted for a different model.

    Raises:
        MismatchError: the model differs; names both digests.
    """
    for bound in bindings:
        if bound.model != digest:
            raise MismatchError(
                "digests",
                f"the exploration plan was calibrated for a different model than {model}",
                where="explore.calibrated_for.model",
                got=digest,
                expected=bound.model,
                action="run `solrl-train calibrate` for this model, or omit the plan",
            )


def check_decoder_precision(
    precision: DecoderPrecision | None, backbone: Backbone, note: Callable[[str], None] | None
) -> None:
    """Refuse a decoder precision in which a model's decoder cannot compute, and warn if this device emulates it.

    Args:
        precision: the decoder's, while exploring.
        backbone: the model.
        note: warns; None if another device explores.

    Raises:
        DecoderError: the decoder cannot compute in it.
    """
    if precision is None:
        return
    fp8_convolutions(backbone.parts.get("vae"))
    if note is not None and not backbone.decodes_by_kernels:
        note(
            "explore.decoder_precision=fp8: the exploring device emulates it, which is slower than the autoencoder's "
            "own precision; omit it, or explore on a GPU from Hopper on"
        )


def note_emulation(emulated: Collection[Tier], precision: Precision, note: Callable[[str], None]) -> None:
    """Warn about the cost of NVFP4, if it is requested by name from a device that emulates it."""
    if precision == "nvfp4" and precision in emulated:
        note(
            "explore.precision=nvfp4: the exploring device has no NVFP4 units and emulates them. That is slower than "
            "BF16 and needs a second copy of the adapted weights; explore.precision=auto uses the fastest native one"
        )


def note_arithmetic(model: ModelInfo, ours: Mapping[str, str], note: Callable[[str], None]) -> None:
    """Say in what the service's arithmetic differs from this process's: equal seeds then differ by rounding."""
    if model.arithmetic is None:
        note("the service does not say what changes its rounding: equal seeds may differ by it")
    elif differing := differences(model.arithmetic, ours):
        note(printable(f"the service's images differ from this process's by rounding: {', '.join(differing)}", 400))
