"""A trainer's rewards at a reward server: what is checked before a run, and whole runs that ask one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from solrl_client.rollouts import RolloutClient
from solrl_core import diagnosis
from solrl_proto.problems import ProblemError
from solrl_proto.rollouts import PromptItem, RewardSpec
from solrl_reward.app import create_app
from solrl_reward.settings import RewardSettings
from solrl_trainer.commands.preflight import check_run, is_usable, require_usable
from solrl_trainer.commands.run import run
from solrl_trainer.memory.run_memory import reward_sizes
from solrl_trainer.service.requirements import require_rewards, reward_specs
from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.presets import resolve
from tests.services.reward_servers import serving
from tests.support.service_helpers import MODEL, RunningService, running_service
from tests.support.small_model import small_model
from tests.trainer.training_helpers import QUICK, events, prompts_in, run_config

AWAY = "http://127.0.0.1:9"
SMALL = (
    *(*QUICK, f"model={small_model()}"),
    *("explore.prompts=1", "explore.keep=4", "explore.candidates=8", "optimizer.updates=1"),
)


def test_a_reward_of_a_server_needs_no_code_here(notes: list[str]) -> None:
    prompts, options = [PromptItem(id="p", text="a red circle")], {"elsewhere:only": {"at": AWAY}}
    require_usable("elsewhere:only", prompts, "train", options)
    assert [is_usable(name, prompts, options) for name in ("elsewhere:only", "verifier")] == [True, False]
    assert [note.partition(": ")[0] for note in notes] == [
        "prompts are not checked with elsewhere:only",
        "prompts are not checked with elsewhere:only",
        "held-out images are not scored with verifier",
    ]
    with pytest.raises(ValueError, match="elsewhere"):
        require_usable("elsewhere:only", prompts, "train", {})


FUSSY = "tests.services.served_rewards:fussy"


@pytest.fixture(scope="module")
def fussy() -> Iterator[str]:
    """A server of a reward that demands something of prompts, under a name that only the server knows."""
    with serving(create_app(RewardSettings(rewards=(f"elsewhere:fussy={FUSSY}",), device="cpu"))) as address:
        yield address


def config_of(output: Path, *overrides: str) -> RunConfig:
    return run_config("mini-sana/sol_rl/clipscore", output, *SMALL, *overrides)


@pytest.mark.parametrize("place", ["here", "at a server"])
@pytest.mark.parametrize(
    ("train", "test", "said"),
    [
        (["a red circle", "a blue cross"], ["a red cross"], "with the train prompts: of prompt 'a blue cross', it has"),
        (["a red circle"], ["a red cross", "a blue cross"], "with the test prompts: of prompt 'a blue cross', it has"),
        (["a red circle"], ["a red cross"], ""),
    ],
    ids=["train", "test, beyond those that are evaluated", "none"],
)
def test_prompts_that_a_reward_cannot_judge_are_refused_before_anything_is_loaded(
    tmp_path: Path, fussy: str, place: str, train: list[str], test: list[str], said: str, notes: list[str]
) -> None:
    name = FUSSY if place == "here" else "elsewhere:fussy"
    options = "{}" if place == "here" else f"{{'{name}': {{at: '{fussy}'}}}}"
    rewards = (f"rewards={{'{name}': 1}}", f"reward_options={options}")
    config = config_of(tmp_path / "run", f"prompts={prompts_in(tmp_path, train, test)}", *rewards)
    if said:
        with pytest.raises(ValueError, match=said):
            check_run(config, resume=False)
    else:
        check_run(config, resume=False)
    assert not [note for note in notes if "not checked" in note]


def test_it_takes_no_memory_and_doctor_says_where_it_is() -> None:
    changes = ["rewards={clipscore: 1}", f"reward_options={{clipscore: {{at: '{AWAY}'}}}}", "evaluate.rewards=[]"]
    config = resolve("mini-sana/sol_rl/clipscore", overrides=changes).config
    assert reward_sizes(config, {}) == {"clipscore": 0}
    found = {one.subject: one for one in diagnosis.rewards(["clipscore"], "mini-sana", options=config.reward_options)}
    assert found["reward clipscore"].state == "n/a"
    assert AWAY in found["reward clipscore"].text


@pytest.mark.slow
def test_a_run_with_a_reward_server_equals_a_local_one_up_to_the_rounding_to_bytes(tmp_path: Path) -> None:
    found = []
    with serving(create_app(RewardSettings(rewards=("clipscore",), options_from="mini-sana", device="cpu"))) as address:
        for folder, options in (("here", "{}"), ("there", f"{{clipscore: {{at: '{address}'}}}}")):
            run(config_of(tmp_path / folder, f"reward_options={options}"))
            found += events(tmp_path / folder, "iteration")
    here, there = found
    assert there["rewards"]["clipscore"] == pytest.approx(here["rewards"]["clipscore"], abs=5e-3)
    assert there["proxy_mean"] == pytest.approx(here["proxy_mean"], abs=5e-3)
    assert there["proxy_mean"] != here["proxy_mean"], "the server scored rounded images"


BROUGHT = "tests.services.served_rewards:brightness"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving(
        create_app(RewardSettings(rewards=(BROUGHT, "clipscore"), options_from=MODEL, device="cpu"))
    ) as address:
        yield address


@pytest.fixture(scope="module")
def service(server: str) -> Iterator[RunningService]:
    """A service that allows this server, and has loaded only CLIPScore."""
    with running_service("--reward-hosts", server, model=small_model()) as running:
        yield running


def bringing(service: RunningService, at: str, *overrides: str, output: Path) -> RunConfig:
    """A small run with both rewards of a server, one of which the service has loaded."""
    options = f"reward_options={{clipscore: {{at: '{at}'}}, '{BROUGHT}': {{at: '{at}'}}}}"
    rewards = f"rewards={{clipscore: 1, '{BROUGHT}': 0.5}}"
    return config_of(output, rewards, options, f"rollout_url={service.url}", *overrides)


def test_a_run_brings_a_reward_that_its_service_has_not_loaded(
    service: RunningService, server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = bringing(service, server, output=tmp_path / "run")
    assert check_run(config, resume=False)[0] == config
    (hosted,) = service.client.get("/v1/models").json()["models"]
    run(config)
    (iteration,) = events(config.output, "iteration")
    assert set(iteration["rewards"]) == {"clipscore", BROUGHT}
    assert 0 < iteration["rewards"][BROUGHT] < 1
    assert "page does not show" not in capsys.readouterr().out
    assert hosted["rewards"] == ["clipscore"]
    samples = service.client.get(f"/v1/runs/{config.run}/iterations").json()["samples"]
    assert len(samples["pairs"]) == 2, "its images were requested, too"


def test_requests_name_the_server_of_what_is_not_loaded(service: RunningService, server: str, tmp_path: Path) -> None:
    config = bringing(service, server, output=tmp_path)
    with RolloutClient(service.url) as client:
        hosted = client.model(MODEL)
    digests = {f"reward:{BROUGHT}": "sha256:" + "1" * 64}
    loaded, brought = reward_specs(config.service_rewards(), config, hosted, digests)
    assert (loaded.name, loaded.at, loaded.digest) == ("clipscore", None, None)
    assert (brought.name, brought.weight, brought.at) == (BROUGHT, 0.5, server)
    assert brought.digest == digests[f"reward:{BROUGHT}"]
    plain = config.model_copy(update={"reward_options": {}})
    assert reward_specs(plain.service_rewards(), plain, hosted) == plain.service_rewards()


def test_a_service_that_asks_no_server_is_refused(service: RunningService, server: str, tmp_path: Path) -> None:
    config = bringing(service, AWAY, output=tmp_path / "away")
    with pytest.raises(ProblemError, match=f"does not call the reward server at {AWAY}") as caught:
        check_run(config, resume=False)
    problem = caught.value.problem
    assert (problem.kind, problem.got, problem.expected) == ("reward-not-loaded", AWAY, [server])
    assert problem.where == f"reward_options.{BROUGHT}.at"
    assert f"--reward-hosts {AWAY}" in (problem.action or "")
    with RolloutClient(service.url) as client:
        models = client.models()
    hosted, none = models.models[0], models.model_copy(update={"reward_hosts": ()})
    asked = reward_specs(config.service_rewards(), config, hosted)
    with pytest.raises(ProblemError, match="does not call reward servers of runs"):
        require_rewards(service.url, none, hosted, asked)
    odd = [spec.model_copy(update={"at": f"{server}/path"}) for spec in asked if spec.at]
    with pytest.raises(ProblemError, match="contains the path '/path'"):
        require_rewards(service.url, models, hosted, odd)
    near = hosted.model_copy(update={"rewards": ("hpsv3",)})
    with pytest.raises(ProblemError, match=r"does not score hpsv2 \(did you mean 'hpsv3'\?\)"):
        require_rewards(service.url, models, near, [RewardSpec(name="hpsv2", weight=1)])
