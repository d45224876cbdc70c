"""Rewards that a run brings to a rollout service: only at listed addresses, and seen by this run alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from solrl_client.addresses import origin
from solrl_client.background import result_of
from solrl_core.fingerprint import fingerprint
from solrl_core.rewards.images import as_floats, as_uint8
from solrl_core.sampling.noise import initial_noise
from solrl_http.tokens import create_token
from solrl_remote.remote_reward import TOKEN
from solrl_reward.app import create_app as create_reward_app
from solrl_reward.settings import RewardSettings
from solrl_rollout.engine import external_rewards
from solrl_rollout.engine.external_rewards import ExternalRewards
from solrl_rollout.engine.work import ExternalReward
from solrl_rollout.http.app import create_app
from solrl_rollout.settings import RolloutSettings
from tests.services.fake_backend import REWARD, SHAPE, FakeBackend
from tests.services.reward_servers import DIGEST, FAULTS, NAME, Misbehaving, client_at, serving
from tests.support.ports import free_port
from tests.support.service_helpers import problem, rollout_request

DEAD = f"http://127.0.0.1:{free_port()}"
OTHER = "sha256:" + "0" * 64


@pytest.fixture
def brought(server: Misbehaving) -> Iterator[Misbehaving]:
    """The server of a run, which is well at first and has not been asked."""
    yield server
    server.leave.set()
    server.mode = "well"
    server.asked.clear()


@pytest.fixture(scope="module")
def server() -> Iterator[Misbehaving]:
    app = Misbehaving()
    with serving(app) as app.address:
        yield app
        app.leave.set()


@pytest.fixture(scope="module")
def real() -> Iterator[str]:
    """A real reward service, with the reward that the rollout service has loaded, too."""
    with serving(create_reward_app(RewardSettings(rewards=(REWARD,), device="cpu"))) as address:
        yield address


@pytest.fixture(scope="module")
def unlisted() -> Iterator[str]:
    """The port of a server that no service allows."""
    with serving(Misbehaving()) as address:
        yield address.rsplit(":", 1)[1]


@pytest.fixture(scope="module")
def client(server: Misbehaving, real: str) -> Iterator[httpx.Client]:
    """A client of a rollout service that allows these servers, and one that is dead."""
    with client_of(server.address, real, DEAD) as found:
        yield found


@contextmanager
def client_of(*hosts: str) -> Iterator[httpx.Client]:
    """A client of a rollout service that allows these servers."""
    settings = RolloutSettings(rewards=(REWARD,), device="cpu", reward_hosts=hosts)
    with client_at(create_app(settings, load_backend=FakeBackend().load)) as client:
        yield client


def ask(client: httpx.Client, *rewards: dict[str, Any], headers: dict[str, str] | None = None) -> httpx.Response:
    """The answer to a request for four candidates."""
    body = rollout_request(precision="bf16") | {"rewards": list(rewards)}
    return client.post("/v1/rollouts", json=body, headers=headers)


def answered(client: httpx.Client, *rewards: dict[str, Any]) -> tuple[dict[str, Any], torch.Tensor]:
    """An answer, and its images, float32 [4, 3, H, W]."""
    response = ask(client, *rewards)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer, initial_noise(answer["groups"][0]["seeds"], SHAPE)


def as_sent(images: torch.Tensor) -> list[float]:
    """Mean pixels of images as a server gets them."""
    means: list[float] = as_floats(as_uint8(images)).mean((1, 2, 3)).tolist()
    return means


def test_a_run_s_reward_is_scored_for_its_request_alone(client: httpx.Client, brought: Misbehaving) -> None:
    before = client.get("/v1/models").json()
    (model,) = before["models"]
    own = {"name": NAME, "weight": 2.0, "at": brought.address, "digest": DIGEST}
    answer, images = answered(client, own, {"name": REWARD})
    (group,) = answer["groups"]
    assert group["rewards"][NAME] == pytest.approx(as_sent(images), abs=1e-6)
    assert group["rewards"][REWARD] == pytest.approx(images.mean((1, 2, 3)).tolist())
    sums = [2 * mine + theirs for mine, theirs in zip(group["rewards"][NAME], group["rewards"][REWARD], strict=True)]
    assert group["scores"] == pytest.approx(sums)
    assert answer["fingerprint"] == fingerprint(model["digests"] | {f"reward:{NAME}": DIGEST}, [NAME, REWARD])
    without_digest, _ = answered(client, {"name": NAME, "at": brought.address}, {"name": REWARD})
    assert without_digest["fingerprint"] == fingerprint(model["digests"], [REWARD])

    assert client.get("/v1/models").json() == before
    assert model["rewards"] == [REWARD]
    assert (problem(ask(client, {"name": NAME}))["kind"]) == "reward-not-loaded"
    metrics = client.get("/metrics").text
    assert NAME not in metrics.replace(REWARD, "")
    assert brought.address not in metrics


def test_it_may_have_the_name_of_a_loaded_one(client: httpx.Client, real: str) -> None:
    (model,) = client.get("/v1/models").json()["models"]
    digest = model["digests"][f"reward:{REWARD}"]
    there, images = answered(client, {"name": REWARD, "at": real, "digest": digest})
    here, same = answered(client, {"name": REWARD})
    assert torch.equal(images, same)
    assert there["groups"][0]["scores"] == as_sent(images)
    assert here["groups"][0]["scores"] == images.mean((1, 2, 3)).tolist() != as_sent(images)
    assert there["fingerprint"] == here["fingerprint"]
    unnamed, _ = answered(client, {"name": REWARD, "at": real})
    assert unnamed["fingerprint"] == fingerprint(model["digests"], [])


def test_none_is_allowed_by_default(brought: Misbehaving) -> None:
    with client_of() as client:
        assert "reward_hosts" not in client.get("/v1/models").json()
        refused = problem(ask(client, {"name": NAME, "at": brought.address}))
        assert (refused["status"], refused["kind"]) == (422, "reward-not-loaded")
        assert (refused["got"], refused["expected"]) == (brought.address, "no address")
        assert "--reward-hosts" in refused["action"]
    assert brought.asked == []


REFUSED = {
    **{"another port": "http://127.0.0.1:{other}", "another name of the host": "http://localhost:{port}"},
    **{"another spelling of the address": "http://127.1:{port}", "a number as address": "http://2130706433:{port}"},
    **{"an address mapped to IPv6": "http://[::ffff:127.0.0.1]:{port}", "another scheme": "https://127.0.0.1:{port}"},
    **{
        "a cloud's metadata": "http://169.254.169.254",
        "a file": "file:///etc/passwd",
        "no HTTP": "gopher://127.0.0.1:{port}",
    },
    **{"a user": "http://someone:secret@127.0.0.1:{port}", "a path": "http://127.0.0.1:{port}/elsewhere"},
    "a listed address as user": "http://127.0.0.1:{port}@127.0.0.1:{other}",
    "a backslash": "http://127.0.0.1:{port}\\@127.0.0.1:{other}",
    **{"a query": "http://127.0.0.1:{port}?a=b", "a fragment": "http://127.0.0.1:{port}#a"},
    **{"a line break": "http://127.0.0.1:{port}\r\nX-Name: value", "no host": "http://:{port}", "nothing": ""},
}


@pytest.mark.parametrize("name", REFUSED)
def test_unlisted_addresses_are_not_asked(client: httpx.Client, brought: Misbehaving, unlisted: str, name: str) -> None:
    at = REFUSED[name].format(port=brought.address.rsplit(":", 1)[1], other=unlisted)
    refused = problem(ask(client, {"name": NAME, "at": at}))
    assert (refused["status"], refused["kind"]) == (422, "reward-not-loaded")
    assert refused["where"] == "body.rewards.0.at"
    assert brought.address in refused["expected"]
    assert "secret" not in str(refused)
    assert brought.asked == []


def test_hosts_must_be_addresses_and_other_spellings_mean_them(client: httpx.Client, brought: Misbehaving) -> None:
    for at in (f"{brought.address}/", brought.address.replace("http", "HTTP"), f" {brought.address}"):
        answered(client, {"name": NAME, "at": at, "digest": DIGEST})
    assert origin("https://Rewards.Lab", "address") == "https://rewards.lab:443"
    assert origin("http://[::1]:9000/", "address") == "http://[::1]:9000"
    listed = ("https://Rewards.Lab:8443", "http://10.0.0.7:9000/", "https://rewards.lab:8443")
    assert RolloutSettings(reward_hosts=listed).reward_hosts == ("https://rewards.lab:8443", "http://10.0.0.7:9000")
    for wrong in ("rewards.lab", "https://rewards.lab/path", "ftp://a", "http://u:p@a", "*"):
        with pytest.raises(ValueError, match="address in reward_hosts"):
            RolloutSettings(reward_hosts=(wrong,))


MODES = ("slow", "nan", "short", "digest", "elsewhere", "cut", "locked", "broken")


@pytest.mark.parametrize("mode", MODES)
def test_a_server_that_fails_fails_its_requests_alone(
    client: httpx.Client, brought: Misbehaving, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external_rewards, "TIMEOUT", 1.0 if mode == "slow" else 60.0)
    brought.leave.clear()
    brought.mode = mode
    # With another digest it is connected anew, for which the time limit counts.
    refused = ask(client, {"name": NAME, "at": brought.address, "digest": OTHER if mode == "slow" else DIGEST})
    found = problem(refused)
    assert (found["status"], found["kind"]) == (503, "reward-failed")
    assert refused.headers["retry-after"] == "5"
    said = {"nan": "gave nan for image 3", "short": "gave 3 scores for 4 images"}
    said["locked"] = "no token is sent to a server that a run brings"
    assert said.get(mode, FAULTS[mode]) in found["detail"]
    assert brought.asked == ["/v1/scores"], "asked once, and no other address"
    answered(client, {"name": REWARD})
    assert NAME not in client.get("/metrics").text.replace(REWARD, "")
    brought.mode = "well"
    monkeypatch.setattr(external_rewards, "TIMEOUT", 60.0)
    answered(client, {"name": NAME, "at": brought.address, "digest": DIGEST})


def test_a_server_must_have_the_reward_and_its_digest(client: httpx.Client, brought: Misbehaving, real: str) -> None:
    has = f"has the digest {DIGEST} now; expected {OTHER}, as the request says"
    cases = (
        ({"name": NAME, "at": DEAD}, f"at {DEAD} gave no answer (ConnectError"),
        ({"name": NAME, "at": brought.address, "digest": OTHER}, has),
        ({"name": "hpsv2", "at": brought.address}, f"does not compute reward 'hpsv2'; expected one of ['{NAME}']"),
        ({"name": "hpsv2", "at": real, "digest": DIGEST}, "does not compute 'hpsv2'"),
    )
    for reward, said in cases:
        refused = problem(ask(client, reward))
        assert (refused["status"], refused["kind"]) == (503, "reward-failed")
        assert said in refused["detail"]
    answered(client, {"name": REWARD})


def test_a_server_that_comes_back_with_another_digest_is_asked_anew(client: httpx.Client, brought: Misbehaving) -> None:
    reward = {"name": NAME, "at": brought.address}
    answered(client, reward)
    brought.asked.clear()
    answered(client, reward)
    assert brought.asked == ["/v1/scores"], "connected already"
    brought.mode = "digest"
    assert "as when this program connected" in problem(ask(client, reward))["detail"]
    brought.mode = "well"
    brought.asked.clear()
    answered(client, reward)
    assert brought.asked == ["/v1/rewards", "/v1/scores"]


def test_neither_the_token_nor_the_caller_s_headers_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = Misbehaving()
    secret, _ = create_token(tmp_path / "tokens.json", "a", ("score",), None)
    monkeypatch.setenv(TOKEN, secret)
    sent = {"Authorization": "Bearer of-the-caller", "Cookie": "a=b", "X-Request-ID": "caller-1", "Forwarded": "for=x"}
    with serving(app) as address, client_of(address) as client:
        for digest in ({}, {"digest": DIGEST}, {"digest": DIGEST}):
            assert ask(client, {"name": NAME, "at": address, **digest}, headers=sent).status_code == 200
    assert app.asked == ["/v1/rewards", *["/v1/scores"] * 3]
    usual = {"host", "accept", "accept-encoding", "connection", "user-agent", "content-type", "content-length"}
    for head in app.heads:
        assert head.keys() <= usual
        assert not any(secret in value or "caller" in value for value in head.values())


async def connected(rewards: ExternalRewards, wanted: ExternalReward) -> Any:
    async with rewards.connected({NAME: wanted}) as found:
        return found[NAME]


def test_connections_are_kept_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_rewards, "MOST_CONNECTED", 2)
    rewards = ExternalRewards()
    first, second, third = (ExternalReward(DEAD, "sha256:" + digit * 64) for digit in "123")

    def found(wanted: ExternalReward) -> Any:
        return result_of(connected(rewards, wanted))

    kept, gone = found(first), found(second)
    assert found(first) is kept
    newest = found(third)
    assert found(first) is kept
    assert found(third) is newest
    assert found(second) is not gone
    assert found(first) is not kept
