"""Rewards of a server: equal to local ones, and every way in which a server can fail is told clearly."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from solrl_client.background import result_of
from solrl_client.cancellation import Cancellation
from solrl_client.retries import Wait
from solrl_core.errors import RewardError, RewardUnavailableError
from solrl_core.families import Backbone
from solrl_core.model_options import ModelOptions
from solrl_core.rewards import RewardSet, load_reward
from solrl_core.rewards.images import as_floats
from solrl_core.rewards.reward import PlainDefaults
from solrl_http.tokens import create_token
from solrl_remote.remote_reward import TOKEN, RemoteReward, connect_reward
from solrl_reward.app import create_app
from solrl_reward.settings import RewardSettings
from solrl_rollout.engine.external_rewards import ExternalRewards
from solrl_rollout.engine.work import ExternalReward
from solrl_rollout.settings import RolloutSettings
from tests.services.fake_backend import FakeBackend, running_engine
from tests.services.reward_servers import DIGEST, FAULTS, NAME, Misbehaving, pictures, serving, until
from tests.support.ports import free_port

PROMPTS = ["a red circle", "a blue square"]
NOBODY = f"http://127.0.0.1:{free_port()}"
BRIGHT = "tests.services.served_rewards:brightness"


def served(*names: str, **settings: Any) -> AbstractContextManager[str]:
    """The address of a reward service with these rewards."""
    return serving(create_app(RewardSettings(rewards=names, options_from="mini-sana", device="cpu", **settings)))


@pytest.fixture
def app() -> Iterator[Misbehaving]:
    """A server that misbehaves."""
    made = Misbehaving()
    with serving(made) as made.address:
        yield made
        made.leave.set()


def score(reward: Any, count: int = 2) -> torch.Tensor:
    scores: torch.Tensor = reward(as_floats(pictures(count)), PROMPTS[:count], [{}] * count)
    return scores


def test_scores_equal_local_ones_bit_for_bit(backbone: Backbone) -> None:
    names = ("clipscore", BRIGHT)
    texts, metadata = [f"a red circle, {i}" for i in range(7)], [{"at": i} for i in range(7)]
    images = as_floats(pictures(7))
    local = RewardSet.load(names, backbone)
    with served(*names) as address:
        remote = RewardSet.load(names, backbone, {name: {"at": address} for name in names}, connect=connect_reward)
        assert remote.digests() == local.digests()
        assert (remote.computed_here, local.computed_here) == ((), names)
        expected, found = (rewards.score(names, images, texts, metadata) for rewards in (local, remote))
    for name in names:
        assert torch.equal(found[name], expected[name])
        assert len(set(found[name].tolist())) == 7


def test_clips_are_sent_whole_to_rewards_that_take_them_and_as_frames_to_others(backbone: Backbone) -> None:
    names = ["motion", "tests.services.served_rewards:brightness"]
    clips = as_floats(pictures(33)).view(3, 11, 3, 32, 32).clone()
    clips[0] = clips[0, :1]  # stands still
    clips[1, 1:] = clips[1, :1] + 0.25 * (clips[1, :1] < 0.5) * 0.04
    texts, metadata = [f"a red circle, {i}" for i in range(3)], [{"at": i} for i in range(3)]
    local = RewardSet.load(names, backbone)
    app = create_app(RewardSettings(rewards=tuple(names), options_from="mini-sana", device="cpu"))
    with serving(app) as address:
        remote = RewardSet.load(names, backbone, {name: {"at": address} for name in names}, connect=connect_reward)
        expected, found = (rewards.score(names, clips, texts, metadata) for rewards in (local, remote))
        brought = ExternalReward(address, local.digests()["reward:motion"])
        assert result_of(_takes_clips(brought, clips=True))
        assert not result_of(_takes_clips(brought, clips=False)), "nobody asked"
    assert expected["motion"][0] == 0 < expected["motion"][1] < expected["motion"][2] == 1
    for name in names:
        assert torch.allclose(found[name], expected[name], atol=0.02)


async def _takes_clips(brought: ExternalReward, *, clips: bool) -> bool:
    async with ExternalRewards().connected({"motion": brought}, clips=clips) as rewards:
        return bool(rewards["motion"].takes_clips)  # type: ignore[attr-defined]


def test_floats_are_sent_rounded_to_bytes() -> None:
    images = 1.4 * torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)) - 0.2
    rounded = (images * 255).round().clamp(0, 255) / 255
    with served(BRIGHT) as address:
        found = RemoteReward(BRIGHT, address)(images, ["a"] * 4, [{}] * 4)
    assert torch.equal(found, rounded.mean((1, 2, 3)))
    assert not torch.equal(found, images.mean((1, 2, 3)))


def test_many_images_are_sent_in_batches_over_one_connection(app: Misbehaving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("solrl_remote.http_reward._KEPT_S", 600.0)
    images = as_floats(pictures(5))
    reward = RemoteReward(NAME, app.address, batch_size=2)
    for _ in range(2):
        found = reward(images, ["a"] * 5, [{}] * 5)
        assert found == pytest.approx(images.mean((1, 2, 3)), abs=1e-6)
    assert app.asked == ["/v1/rewards"] + ["/v1/scores"] * 6
    assert len(set(app.ports)) == 1


@pytest.mark.parametrize("mode", FAULTS)
def test_an_answer_that_cannot_be_used_is_an_error_of_the_server(app: Misbehaving, mode: str) -> None:
    reward = RemoteReward(NAME, app.address, timeout=2.0 if mode in ("slow", "dripping") else 60)
    assert reward.digest == DIGEST
    app.mode = mode
    with pytest.raises(RewardUnavailableError) as caught:
        RewardSet({NAME: reward}).score([NAME], as_floats(pictures(2)), PROMPTS, [{}] * 2)
    assert FAULTS[mode] in str(caught.value)
    assert f"reward 'brightness' at {app.address}" in str(caught.value)
    assert app.asked == ["/v1/rewards", "/v1/scores"], "asked once, and no other address"
    app.leave.set()
    app.mode = "well"
    assert score(reward) == pytest.approx(as_floats(pictures(2)).mean((1, 2, 3)), abs=1e-6)


def test_a_cancelled_call_leaves_the_server(app: Misbehaving) -> None:
    reward, cancelled, faults = RemoteReward(NAME, app.address, timeout=600, patience=600), Cancellation(), []

    def call() -> None:
        with pytest.raises(RewardUnavailableError) as caught:
            cancelled.run(score, reward)
        faults.append(str(caught.value))

    app.mode = "slow"
    caller = threading.Thread(target=call)
    caller.start()
    until(lambda: app.asked.count("/v1/scores") == 1)
    cancelled.set()
    caller.join(600)
    assert ["nobody waits for it" in fault for fault in faults] == [True]
    until(lambda: app.left)
    with pytest.raises(RewardUnavailableError):
        cancelled.run(score, reward)
    assert app.asked.count("/v1/scores") == 1


def test_a_reward_that_fails_at_the_server_is_not_the_servers_fault(app: Misbehaving) -> None:
    rewards = RewardSet({NAME: RemoteReward(NAME, app.address, patience=60)})
    app.mode = "fails"
    with pytest.raises(RewardError, match=r"failed at http:.* as the test says") as caught:
        rewards.score([NAME], as_floats(pictures(2)), PROMPTS, [{}] * 2)
    assert not isinstance(caught.value, RewardUnavailableError)
    assert app.asked.count("/v1/scores") == 1


@pytest.mark.parametrize("mode", [mode for mode in FAULTS if mode != "dripping"])
def test_a_trainer_asks_again(app: Misbehaving, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, Wait | None]] = []
    timeout = 2.0 if mode == "slow" else 60
    reward = RemoteReward(NAME, app.address, timeout=timeout, patience=600, on_wait=lambda *wait: told.append(wait))
    pauses: list[float] = []

    async def heal(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            app.leave.set()
            app.mode = "well"

    here = SimpleNamespace(sleep=heal, timeout=asyncio.timeout)
    monkeypatch.setattr("solrl_remote.http_reward.asyncio", here)
    app.mode = mode
    assert len(score(reward)) == 2
    assert pauses == [0.5, 1.0]
    assert {server for server, _ in told} == {app.address}
    first, second, end = (wait for _, wait in told)
    assert [wait is not None and FAULTS[mode] in wait.fault for wait in (first, second)] == [True, True]
    assert end is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"at": "ftp://host"}, "got address of reward 'brightness' 'ftp://host'; expected http://HOST:PORT"),
        ({"at": "http://user:secret@host"}, "contains a user or password"),
        ({"at": NOBODY, "timeout": 0}, "expected seconds above 0"),
        ({"at": NOBODY, "batch_size": 0}, "expected at least 1"),
        ({"at": NOBODY, "model": "x"}, "expected at, timeout and batch_size"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=r"brightness|batch_size") as caught:
        connect_reward(NAME, options)
    assert said in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_server_must_be_there_and_have_the_reward(app: Misbehaving) -> None:
    with pytest.raises(ValueError, match=r"does not compute reward .hpsv2.; .*brightness.* --rewards hpsv2"):
        connect_reward("hpsv2", {"at": app.address})
    with pytest.raises(RewardUnavailableError, match=r"gave no answer \(ConnectError"):
        connect_reward(NAME, {"at": NOBODY})


def test_metadata_that_a_server_refuses_is_not_sent_again() -> None:
    many = {"include": [{"class": "circle", "color": "red", "count": 10**7}]}
    with (
        served("verifier") as address,
        pytest.raises(RewardError, match=r"refused by .*include\.0\.count is 10000000") as told,
    ):
        RemoteReward("verifier", address, patience=600)(as_floats(pictures(1)), PROMPTS[:1], [many])
    assert not isinstance(told.value, RewardUnavailableError)


def test_the_token_comes_from_the_environment(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tokens.json"
    secret, _ = create_token(file, "a", ("score",), None)
    with served(BRIGHT, token_file=file) as address:
        with pytest.raises(RewardUnavailableError, match=f"answered 401 .*{TOKEN}"):
            RemoteReward(BRIGHT, address)
        monkeypatch.setenv(TOKEN, secret)
        assert len(score(RemoteReward(BRIGHT, address))) == 2


def test_a_model_cannot_choose_where_images_are_sent(app: Misbehaving) -> None:
    cpu = torch.device("cpu")
    model = PlainDefaults(cpu, ModelOptions(rewards={"clipscore": {"at": app.address}}))
    with pytest.raises(ValueError, match=r"solrl\.json gives 'at' for reward 'clipscore'"):
        load_reward("clipscore", model, connect=connect_reward)
    assert app.asked == []
    with pytest.raises(ValueError, match="rewards of its own only"):
        load_reward("clipscore", PlainDefaults(cpu), {"at": app.address})


def test_a_rollout_service_does_not_start_without_its_reward_server() -> None:
    refused = pytest.raises(RewardUnavailableError, match=f"'{NAME}' at {NOBODY} gave no answer")
    with refused, running_engine(FakeBackend(), rewards=(f"{NAME}@{NOBODY}",)):
        pass


def test_settings_name_a_server_with_the_reward() -> None:
    options = {"hpsv2": {"at": "http://b", "timeout": 9}, "clipscore": {"dtype": "bfloat16"}}
    named = ("imagereward@http://a:1", "hpsv2", "clipscore", "m:x@https://c")
    given = RolloutSettings(rewards=named, reward_options=options)
    assert given.reward_names == ("imagereward", "hpsv2", "clipscore", "m:x")
    assert given.options_of_rewards == options | {"imagereward": {"at": "http://a:1"}, "m:x": {"at": "https://c"}}
    assert given.reward_options == options
    assert (given.dtype_of_rewards, RolloutSettings(device="cuda:1").dtype_of_rewards) == (None, "bfloat16")
    for wrong in (("a@http://x", "a"), ("a@http://x", "a@http://y"), ("@http://x",), ("a@",)):
        with pytest.raises(ValueError, match="reward"):
            RolloutSettings(rewards=wrong)
