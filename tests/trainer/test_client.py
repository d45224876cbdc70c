"""The trainer's client against a real service: cut streams, restarts, refusals."""

from collections.abc import Iterator

import pytest
from cutting_proxy import CuttingProxy, cutting_proxy
from service_helpers import RunningService, adapter_file, rollout_request, running_service
from solrl_core.adapter import adapter_digest
from solrl_core.families import load_backbone
from solrl_core.fingerprint import fingerprint
from solrl_core.lora import adapter_layout
from solrl_proto.problems import Problem, ProblemError
from solrl_proto.rollouts import RolloutGroup, RolloutRequest
from solrl_trainer.client import RolloutClient, rollout_token
from solrl_trainer.explore import Explorer
from training_helpers import tiny_config

PROMPTS = [f"{i} red circles" for i in range(6)]


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    with running_service() as running:
        yield running


@pytest.fixture
def proxy(service: RunningService) -> Iterator[CuttingProxy]:
    with cutting_proxy(service.port) as found:
        yield found


def request_of(**more: object) -> RolloutRequest:
    return RolloutRequest.model_validate(rollout_request(prompts=PROMPTS, count=8, steps=1) | more)


@pytest.mark.parametrize("explicit", [False, True], ids=["seed root", "seeds"])
def test_a_cut_stream_is_taken_up_where_it_broke_off(
    service: RunningService, proxy: CuttingProxy, explicit: bool
) -> None:
    request = request_of()
    if explicit:
        request = request_of(candidates={"seeds": [seeds for _, seeds in request.groups()]})
    with RolloutClient(service.url) as client:
        whole = client.rollouts(request)
    came: list[RolloutGroup] = []
    # In the middle of a line, right at the head, and in the last line.
    proxy.limits = [2500, 20, 1200]
    with RolloutClient(proxy.url, pause=0.01) as client:
        answer = client.rollouts(request, on_group=came.append)
    assert answer.groups == whole.groups
    assert sorted(group.prompt_id for group in came) == [prompt.id for prompt in request.prompts]
    assert proxy.connections == 4


def test_an_answer_that_never_ends_is_given_up_after_the_patience(proxy: CuttingProxy) -> None:
    proxy.limits = [10] * 1000
    with RolloutClient(proxy.url, pause=0.01, patience=0.3) as client, pytest.raises(ProblemError) as raised:
        client.rollouts(request_of())
    assert raised.value.problem.kind == "service-unreachable"
    assert proxy.connections > 2


def test_a_group_of_another_version_is_refused_before_it_is_used(service: RunningService, proxy: CuttingProxy) -> None:
    backbone = load_backbone("mini-sana")
    service.push("exact", 3, adapter_file(adapter_layout(backbone.transformer, backbone.lora_targets), 0))
    request = request_of(adapter={"run": "exact", "version": 3})
    proxy.changed = (b'"version":3}', b'"version":2}')
    came: list[RolloutGroup] = []
    with RolloutClient(proxy.url) as client, pytest.raises(ProblemError) as raised:
        client.rollouts(request, on_group=came.append)
    told = raised.value.problem
    assert (told.kind, told.got) == (
        "served-differently",
        {"model": "mini-sana", "adapter": {"run": "exact", "version": 2}},
    )
    assert came == []


def test_a_refusal_is_mended_once_or_raised(service: RunningService) -> None:
    seen: list[str] = []

    def mend(problem: Problem) -> bool:
        seen.append(problem.kind)
        return len(seen) < 2

    request = request_of(adapter={"run": "nobody", "version": 0})
    with RolloutClient(service.url) as client, pytest.raises(ProblemError) as raised:
        client.rollouts(request, mend=mend)
    assert seen == ["run-not-found"] * 2
    assert raised.value.problem.status == 404


def test_what_a_run_holds_is_told_or_none(service: RunningService) -> None:
    with RolloutClient(service.url) as client:
        assert client.adapters("nobody") is None
        client.delete("nobody")


class Restarting(RolloutClient):
    """Its service has lost the run by the time it is to go back."""

    def rewind(self, run: str, version: int, head: int) -> None:
        self.delete(run)
        super().rewind(run, version, head)


def test_a_run_goes_back_and_is_pushed_anew_only_where_the_service_has_lost_its_versions(
    service: RunningService,
) -> None:
    config = tiny_config(run="behind")
    backbone = load_backbone("mini-sana")
    layout = adapter_layout(backbone.transformer, backbone.lora_targets)
    files = [adapter_file(layout, seed) for seed in range(4)]
    own = {adapter_digest(file) for file in files}

    def held() -> tuple[list[int], tuple[int, ...]]:
        listed = client.adapters("behind")
        assert listed is not None
        return [info.version for info in listed.versions], listed.pinned

    with RolloutClient(service.url) as client, Restarting(service.url) as restarting:
        explorer = Explorer(client, config)
        explorer.start({0: files[0]})
        for version in (1, 2, 3):
            explorer.push(version, files[version])
        service.client.put("/v1/runs/behind/adapters/1/pin").raise_for_status()
        Explorer(client, config).start({1: files[1], 2: files[2]}, own)
        assert held() == ([0, 1, 2], (1,))
        with pytest.raises(ProblemError) as raised:
            Explorer(client, config).start({1: files[1]})
        assert raised.value.problem.kind == "run-taken"
        assert held() == ([0, 1, 2], (1,))
        restarting.push("behind", 3, 2, config.model_name, files[3])
        Explorer(restarting, config).start({2: files[2]}, own)
        assert held() == ([2], ())
        service.client.delete("/v1/runs/behind").raise_for_status()
        client.push("behind", 2, None, config.model_name, files[2])
        Explorer(client, config).start({0: files[0], 1: files[1]}, own)
        assert held() == ([0, 1], ())


def test_the_token_comes_from_the_environment_or_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.delenv("SOLRL_TOKEN", raising=False)
    monkeypatch.delenv("SOLRL_TOKEN_PATH", raising=False)
    assert rollout_token() is None
    monkeypatch.setenv("SOLRL_TOKEN", "from-environment")
    assert rollout_token() == "from-environment"
    path = f"{tmp_path}/token"
    with open(path, "w") as file:
        file.write("from-file\n")
    monkeypatch.setenv("SOLRL_TOKEN_PATH", path)
    assert rollout_token() == "from-file"


def test_a_service_that_came_back_with_another_model_is_refused(service: RunningService) -> None:
    config = tiny_config("explore.candidates=4", "explore.keep=2", "explore.steps=1", run="changed")
    (model,) = service.client.get("/v1/models").json()["models"]
    ours = fingerprint(model["digests"], ["clipscore"])
    prompts = request_of().prompts[:1]
    with RolloutClient(service.url) as client:
        same = Explorer(client, config, ours)
        backbone = load_backbone("mini-sana")
        same.start({0: adapter_file(adapter_layout(backbone.transformer, backbone.lora_targets), 0)})
        assert same.explore(prompts, 0, 7).fingerprint == ours
        with pytest.raises(ProblemError) as raised:
            Explorer(client, config, "sha256:" + "0" * 64).explore(prompts, 0, 7)
    assert (raised.value.problem.kind, raised.value.problem.got) == ("digest-mismatch", ours)
