"""Requirements of a run on its rollout service, and the problems that it finds."""

from collections.abc import Mapping, Sequence

from solrl_client.addresses import origin
from solrl_client.rollouts import TOKEN_ADVICE, RolloutClient
from solrl_core.errors import MismatchError
from solrl_core.families import Backbone
from solrl_core.fingerprint import check_digests
from solrl_core.model_options import size_text
from solrl_core.rewards.reward import AT
from solrl_core.sampling.noise import check_noise_contract
from solrl_core.suggestions import did_you_mean
from solrl_proto.identifiers import Precision
from solrl_proto.models import ModelInfo, ModelList
from solrl_proto.problems import ProblemError, ProblemKind
from solrl_proto.rollouts import RewardSpec

from solrl_trainer.settings.config import RunConfig


def hosted_model(client: RolloutClient, name: str) -> tuple[ModelList, ModelInfo]:
    """All models of a service, and the one of this name.

    Raises:
        ProblemError: the service cannot be reached, or does not host the model.
        MismatchError: its noise contract differs.
    """
    listed = client.models()
    check_noise_contract(listed.noise)
    return listed, client.find_model(listed, name)


def reward_specs(
    rewards: Sequence[RewardSpec], config: RunConfig, hosted: ModelInfo, digests: Mapping[str, str] | None = None
) -> tuple[RewardSpec, ...]:
    """Rewards as the run's requests name them, with the run's own server for rewards that the service has not loaded.

    `reward_options` may name this server. `digests` are by `reward:<name>`; the servers' digests must equal them.
    """
    options, expected = config.reward_options, digests or {}

    def requested(spec: RewardSpec) -> RewardSpec:
        at = options.get(spec.name, {}).get(AT)
        if at is None or spec.name in hosted.rewards:
            return spec
        return RewardSpec(name=spec.name, weight=spec.weight, at=at, digest=expected.get(f"reward:{spec.name}"))

    return tuple(map(requested, rewards))


def require_scopes(url: str, service: ModelList) -> None:
    """Refuse a token that may not push or explore, if its scopes are known, by a ProblemError 403 `forbidden`."""
    lacking = [scope for scope in ("rollout", "push") if scope not in (service.scopes or ())]
    if service.scopes is not None and lacking:
        raise ProblemError(
            ProblemKind.FORBIDDEN,
            f"the token for the service at {url} lacks the scope {' and '.join(map(repr, lacking))}",
            got=list(service.scopes),
            expected="rollout, to explore, and push, to store adapters",
            action=f"use a token created with `--scopes rollout push`; {TOKEN_ADVICE}",
        )


def require_rewards(url: str, service: ModelList, hosted: ModelInfo, rewards: Sequence[RewardSpec]) -> None:
    """Refuse a service that does not score a reward, or does not ask the server that the run brings for it.

    `hosted` is the run's model there; `rewards` are as requests name them. The ProblemError is 422 `reward-not-loaded`.
    """
    for spec in rewards:
        if spec.at is not None:
            _require_server(url, service.reward_hosts, spec.name, spec.at)
    names = [spec.name for spec in rewards]
    missing = sorted({spec.name for spec in rewards if spec.at is None} - set(hosted.rewards))
    if missing:
        raise ProblemError(
            ProblemKind.REWARD_NOT_LOADED,
            f"the service at {url} does not score {', '.join(missing)}{did_you_mean(missing[0], hosted.rewards)}",
            got=names,
            expected=sorted(hosted.rewards),
            action=f"start the service with --rewards {' '.join(sorted({*hosted.rewards, *missing}))}",
        )


def _require_server(url: str, allowed: Sequence[str], name: str, address: str) -> None:
    fault = f"the service at {url} has not loaded {name}, and does not call reward servers of runs"
    try:
        address = origin(address, f"address of reward {name!r}")
        if address in allowed:
            return
        if allowed:
            fault = f"the service at {url} has not loaded {name}, and does not call the reward server at {address}"
    except ValueError as error:
        fault = f"the service at {url} has not loaded {name}, and can ask no such server for it: {error}"
    raise ProblemError(
        ProblemKind.REWARD_NOT_LOADED,
        fault,
        where=f"reward_options.{name}.at",
        got=address,
        expected=list(allowed) or "a reward that is loaded there",
        action=f"ask its operator to start it with --reward-hosts {address}, or --rewards {name}@{address}",
    )


def run_taken(url: str, run: str, head: int) -> ProblemError:
    """The problem of a name that another run at the service has."""
    return ProblemError(
        ProblemKind.RUN_TAKEN,
        f"the service at {url} has another run {run!r}, whose head is version {head}",
        where="run",
        got=run,
        action=f"choose another name with --run, or delete that run: solrl-train runs delete {run} --rollout-url {url}",
    )


def require_precision(url: str, hosted: ModelInfo, precision: Precision) -> None:
    """Refuse a service that does not explore at the run's precision, by a ProblemError 422 `precision-unsupported`."""
    offered = [info.precision for info in hosted.precisions]
    if precision not in offered:
        raise ProblemError(
            ProblemKind.PRECISION_UNSUPPORTED,
            f"the service at {url} does not generate in {precision}",
            where="explore.precision",
            got=precision,
            expected=offered,
            action=f"set explore.precision=auto, or use a service that offers {precision}",
        )


def check_size(hosted: ModelInfo, backbone: Backbone) -> None:
    """Refuse a service whose model makes images of another size, by a MismatchError that names both."""
    theirs, ours = map(size_text, (hosted, backbone))
    if theirs != ours:
        options = f"--height {backbone.height} --width {backbone.width}"
        options += f" --frames {backbone.frames}" if backbone.frames > 1 else ""
        raise MismatchError(
            "size",
            "the service makes images of another size: it would rank images that are never trained on",
            where="generate",
            got=theirs,
            expected=ours,
            action=f"serve with {options}, or change the section generate",
        )


def check_hosted(hosted: ModelInfo, rewards: Sequence[RewardSpec], digests: Mapping[str, str]) -> None:
    """Compare a service's digests of model and rewards with `digests`, loaded here; a MismatchError names the part."""
    # Requests name the digests of rewards that the service has not loaded.
    scored = {f"reward:{spec.name}" for spec in rewards if spec.at is None}
    ours = {name: digest for name, digest in digests.items() if name in scored or not name.startswith("reward:")}
    check_digests(hosted.digests, ours)
