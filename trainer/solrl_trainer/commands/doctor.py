"""`solrl-train doctor`: checks of this machine and of a service, with a remedy for everything that is missing."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from solrl_core import diagnosis
from solrl_core.diagnosis import Finding
from solrl_core.errors import MismatchError
from solrl_proto.problems import ProblemError

if TYPE_CHECKING:
    from solrl_proto.models import ModelList


def check(
    model: str, rollout_url: str | None, prompts: str, rewards: Sequence[str] = ("clipscore",)
) -> Iterator[Finding]:
    """Findings about everything that a training needs.

    Args:
        model: registered name, local folder in diffusers format, hub id, or FILE.safetensors+ one of these.
        rollout_url: base URL of a rollout service, or None for none.
        prompts: a registered set, or a folder.
        rewards: names of the rewards to train on, each with @http://… if a reward server computes it.
    """
    import torch

    yield from diagnosis.machine()
    yield diagnosis.model(model)
    servers = {name: at for name, separator, at in (text.partition("@") for text in rewards) if separator}
    options = {name: {"at": at} for name, at in servers.items()}
    names = [text.partition("@")[0] for text in rewards]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    yield from diagnosis.rewards(names, model, options=options, device=device, prompts=_first_prompts(prompts))
    yield from _prompts(prompts, names, options)
    if rollout_url is not None:
        yield from _service(rollout_url, model, servers)


def _first_prompts(name: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Text and metadata of the first training prompts; none if they cannot be read, which `_prompts` says."""
    from solrl_trainer.prompts.prompt_sets import find_prompts, read_split

    with suppress(ValueError, OSError):
        return [(prompt.text, prompt.metadata) for prompt in read_split(find_prompts(name), "train").prompts[:2]]
    return []


def _prompts(name: str, rewards: Sequence[str], options: diagnosis.Options) -> Iterator[Finding]:
    """Whether the prompts can be read, and rewards that cannot judge images of one of them."""
    from solrl_trainer.commands.preflight import unsuitable_prompt
    from solrl_trainer.prompts.prompt_sets import find_prompts, in_both, read_split
    from solrl_trainer.records.shown_log import shown_log

    try:
        folder = find_prompts(name)
        train, test = read_split(folder, "train"), read_split(folder, "test")
    except (ValueError, OSError) as error:
        yield Finding("prompts", "missing", f"{name}: {error}", "give a folder with train.txt and test.txt")
        return
    counts = f"{name}: {len(train.prompts)} training, {len(test.prompts)} held out"
    both = in_both(train.texts, test.texts, f"{train.path.name} or {test.path.name}")
    yield Finding("prompts", "warn" if both else "ok", counts, both)
    for reward in rewards:
        noted: list[str] = []
        with shown_log(noted.append), suppress(ValueError):  # that there is no such reward is a finding of its own
            if fault := unsuitable_prompt(reward, [*train.prompts, *test.prompts], options):
                action = "use prompts with the text and metadata that it needs, or another reward"
                yield Finding(f"prompts for {reward}", "missing", fault, action)
        for note in noted:
            yield Finding(f"prompts for {reward}", "warn", note)


def _at_servers(url: str, service: "ModelList", model: str, servers: Mapping[str, str]) -> Iterator[Finding]:
    """Whether a service has loaded rewards of servers, or asks these servers itself."""
    from solrl_proto.rollouts import RewardSpec

    from solrl_trainer.service.requirements import require_rewards

    (hosted,) = (one for one in service.models if one.name == model)
    for name, at in servers.items():
        if name in hosted.rewards:
            yield Finding(f"service: {name}", "ok", "loaded by the service")
            continue
        try:
            require_rewards(url, service, hosted, [RewardSpec(name=name, at=at)])
        except ProblemError as error:
            yield Finding(f"service: {name}", "missing", error.problem.detail, error.problem.action or "")
        else:
            yield Finding(f"service: {name}", "ok", f"the service asks the server at {at} for this run")


def _service(url: str, model: str, servers: Mapping[str, str]) -> Iterator[Finding]:
    from solrl_client.rollouts import RolloutClient
    from solrl_core.sampling.noise import check_noise_contract
    from solrl_proto.identifiers import default_model_name

    from solrl_trainer.service.requirements import require_scopes

    try:
        with RolloutClient(url, patience=0) as client:
            hosted = client.models()
        names, expected = [info.name for info in hosted.models], default_model_name(model)
        hosts = f"{url} hosts {', '.join(names)}"
        if expected in names:
            yield Finding("service", "ok", hosts)
            yield from _at_servers(url, hosted, expected, servers)
        else:
            yield Finding("service", "warn", hosts, f"start it with --model {model}, or name its model by served_as")
        require_scopes(url, hosted)
        check_noise_contract(hosted.noise)
        yield Finding("noise contract", "ok", f"version {hosted.noise.version}, probe row agrees")
    except ProblemError as error:
        problem = error.problem
        yield Finding("service", "missing", f"{url}: {problem.title}: {problem.detail}", problem.action or "")
    except MismatchError as error:
        yield Finding("noise contract", "missing", error.detail, error.action or "")
    except (ValueError, OSError) as error:
        yield Finding("service", "missing", str(error))
