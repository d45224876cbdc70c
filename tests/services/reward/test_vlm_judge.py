"""A judge at an OpenAI-compatible endpoint: its scores, and every way in which the endpoint can fail."""

import asyncio
import logging
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from PIL import Image
from solrl_client.background import result_of, start
from solrl_core.errors import RewardError, RewardUnavailableError
from solrl_core.model_options import ModelOptions
from solrl_core.rewards import RewardSet, load_reward
from solrl_core.rewards.images import as_floats
from solrl_core.rewards.reward import PlainDefaults
from solrl_http.logs import TextFormatter
from solrl_remote.remote_reward import RemoteReward, connect_reward
from solrl_remote.vlm_judge import TOKEN, VlmJudge
from solrl_reward.app import create_app
from solrl_reward.settings import RewardSettings
from tests.services.fake_judge import KEY, MODEL, FakeJudge, question
from tests.services.reward_servers import ask, body, client_at, pictures, serving, until
from tests.support.ports import free_port
from tests.support.service_helpers import problem

JUDGE = "vlm_judge"
UNAVAILABLE = {
    "limited": "answered 429 to /chat/completions: Rate limit reached",
    "broken": "answered 500 to /chat/completions: CUDA error",
    "html": r"got '<html>\\x1b[31mhello'; check the address",
    "other document": "choices: Field required",
    **{"elsewhere": "answered 307", "no answer": "gave 0 answers to one question; expected one"},
    **{"nine answers": "choices: Tuple should have at most 8 items", "log-probabilities that are none": "logprob"},
    "megabytes of answers": "answered 200 to /chat/completions with more than 101376 bytes",
}
"""Faults of the endpoint, and what the error says."""
FAILED = {
    "too large": "answered 400 to /chat/completions: This model's maximum context length is 10 tokens",
    "nothing": "the answer has no score: got ''; expected a number alone; change the template, label or range to fit",
    "only reasoning": "the answer after 11 characters of reasoning has no score: got ''",
    "modern": "Unsupported parameter: 'logprobs'; for a parameter that it refuses, see the judge's options token_limit",
    "outside": "the answer states the score 7; expected 1 to 5",
    "cut": "the answer was cut after 16 tokens, at 'The image shows'; raise max_tokens",
}
"""Faults of an answer, and what the error says."""


@pytest.fixture
def fake() -> Iterator[FakeJudge]:
    judge = FakeJudge()
    with serving(judge.app) as address:
        judge.endpoint = f"{address}/v1"
        yield judge
        judge.hold.set()


def shades(count: int) -> torch.Tensor:
    """Images of one grey each, whose exact scores are 1 to 5."""
    levels = (torch.linspace(0, 255, count)).round().to(torch.uint8)
    return levels[:, None, None, None].expand(-1, 3, 8, 8)


def grey(more: int = 0) -> Image.Image:
    return Image.new("RGB", (8, 8), (128 + more,) * 3)


class Clock:
    """A clock that goes on only while somebody waits for it, in place of the judge's `asyncio`, or of `time`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in ("vlm_judge", "http_reward"):
            monkeypatch.setattr(f"solrl_remote.{module}.asyncio", self)
        self.slept: list[float] = []
        self.goes = threading.Event()
        self.goes.set()
        self._now = time.monotonic() + 1e6  # after every real time

    async def sleep(self, seconds: float) -> None:
        if seconds > 0:
            self.slept.append(seconds)
            while not self.goes.is_set():
                await asyncio.sleep(0.01)
            self._now += seconds

    def get_running_loop(self) -> "Clock":
        return self

    def time(self) -> float:
        return self._now

    monotonic = time

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)


def judged(reward: Any, images: torch.Tensor, prompt: str = "a red circle") -> torch.Tensor:
    found: torch.Tensor = reward(as_floats(images), [prompt] * len(images), [{}] * len(images))
    return found


def exact(images: torch.Tensor) -> torch.Tensor:
    return 1 + 4 * as_floats(images).mean((1, 2, 3))


def test_scores_are_expectations_in_the_order_of_the_images_and_paid_for_once(fake: FakeJudge) -> None:
    images = torch.cat([shades(9), pictures(3, side=8)])
    judge = VlmJudge(fake.endpoint, MODEL)
    found = judged(judge, images)
    torch.testing.assert_close(found, exact(images), rtol=1e-5, atol=1e-5)
    request = fake.asked[0]
    assert (request["model"], request["temperature"], request["max_tokens"]) == (MODEL, 0, 16)
    assert (request["logprobs"], request["top_logprobs"]) == (True, 20)
    assert "a red circle" in question(request)
    assert "from 1 (worst) to 5 (best)" in question(request)
    spent = dict(judge.costs)
    assert spent == {"requests": 12, "prompt_tokens": 1200, "completion_tokens": 24}
    assert torch.equal(judged(judge, images), found)
    assert judge.costs == spent
    judged(judge, images, "another prompt")
    assert len(fake.asked) == 24


def test_without_log_probabilities_scores_are_the_stated_numbers(fake: FakeJudge) -> None:
    images, stated = shades(9), torch.tensor([1, 1, 2, 2, 3, 3, 4, 4, 5])
    fake.mode = "no log-probabilities"
    found = judged(VlmJudge(fake.endpoint, MODEL), images)
    assert (found - exact(images)).abs().max() == pytest.approx(0.5, abs=0.02)
    assert torch.equal(found, found.round())
    fake.mode = "log-probabilities of another text"
    assert torch.equal(judged(VlmJudge(fake.endpoint, MODEL), images), found)
    fake.mode = "well"
    assert torch.equal(judged(VlmJudge(fake.endpoint, MODEL, logprobs=False), images), found)
    assert "logprobs" not in fake.asked[-1]
    assert int((found != stated).sum()) <= 4  # those halfway


def test_a_template_and_a_label_fit_a_model_that_explains(fake: FakeJudge) -> None:
    fake.prefix = ["It is", " grey.", "\n", "Final Score:", " "]
    template = "Rate {lowest} to {highest}: [{prompt}]. End with 'Final Score:'."
    judge = VlmJudge(fake.endpoint, MODEL, template=template, label="Final Score:", max_tokens=64)
    assert judged(judge, shades(3), "a {lowest} {prompt}") == pytest.approx(torch.tensor([1.0, 3.0, 5.0]), abs=0.02)
    assert question(fake.asked[0]) == "Rate 1 to 5: [a {lowest} {prompt}]. End with 'Final Score:'."


def test_models_that_think_or_take_other_limits_are_asked_in_their_way(fake: FakeJudge) -> None:
    fake.prefix = ["<think>", "2 or 5", "?", "</think>", "\n\n"]
    torch.testing.assert_close(judged(VlmJudge(fake.endpoint, MODEL), shades(3)), exact(shades(3)))
    fake.mode = "modern"
    options: dict[str, Any] = {"token_limit": "max_completion_tokens", "temperature": None, "logprobs": False}
    effort = {"reasoning_effort": "minimal"}
    judge = VlmJudge(fake.endpoint, MODEL, max_tokens=500, extra_body=effort, **options)
    assert judged(judge, shades(3)).tolist() == [1, 3, 5]
    sent = {name: value for name, value in fake.asked[-1].items() if name != "messages"}
    assert sent == {"model": MODEL, "max_completion_tokens": 500, **effort}


@pytest.mark.parametrize("mode", UNAVAILABLE)
def test_a_fault_of_the_endpoint_is_told_and_spoils_nothing(fake: FakeJudge, mode: str) -> None:
    judge = VlmJudge(fake.endpoint, MODEL, patience=0)
    fake.mode = mode
    with pytest.raises(RewardUnavailableError) as caught:
        RewardSet({JUDGE: judge}).score([JUDGE], as_floats(shades(2)), ["a", "b"], [{}] * 2)
    assert f"reward 'vlm_judge' at {fake.endpoint} " in str(caught.value)
    assert UNAVAILABLE[mode] in str(caught.value)
    fake.mode = "well"
    assert torch.allclose(judged(judge, shades(2)), exact(shades(2)), atol=1e-5)


@pytest.mark.parametrize("mode", FAILED)
def test_a_fault_of_an_answer_names_the_image(fake: FakeJudge, mode: str) -> None:
    judge = VlmJudge(fake.endpoint, MODEL, patience=600, in_flight=1)
    judged(judge, shades(3)[:1])
    fake.mode = mode
    with pytest.raises(RewardError, match=r"failed on image 1 of prompt .a red circle.: ") as caught:
        RewardSet({JUDGE: judge}).score([JUDGE], as_floats(shades(3)), ["a red circle"] * 3, [{}] * 3)
    assert not isinstance(caught.value, RewardUnavailableError)
    assert FAILED[mode] in str(caught.value)
    assert len(fake.asked) <= 3, "neither asked again, nor are images after the one that failed"
    fake.mode = "well"
    assert torch.allclose(judged(judge, shades(3)), exact(shades(3)), atol=1e-5)


@pytest.mark.parametrize(
    ("mode", "pauses"),
    [("broken", [0.5, 1.0, 2.0]), ("limited", [7.0, 7.0, 7.0]), ("limited until a date", [0.5, 1.0, 2.0])],
)
def test_temporary_faults_are_repeated_with_growing_pauses(
    fake: FakeJudge, mode: str, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    judge, clock = VlmJudge(fake.endpoint, MODEL, patience=600), Clock(monkeypatch)
    fake.mode, fake.faulty = mode, 3
    assert result_of(judge._judge(0, grey(), "a")) == pytest.approx(3.0, abs=0.02)
    assert clock.slept == pauses
    assert len(fake.asked) == 4
    assert judge.costs == {"requests": 4, "prompt_tokens": 100, "completion_tokens": 2}


def test_patience_ends(fake: FakeJudge, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.mode = "limited"
    with pytest.raises(RewardUnavailableError, match="answered 429"):
        judged(VlmJudge(fake.endpoint, MODEL, patience=6.9), shades(1))
    assert len(fake.asked) == 1, "it would have to wait for longer"
    fake.mode = "broken"
    judge = VlmJudge(fake.endpoint, MODEL, patience=0.9)
    monkeypatch.setattr("solrl_client.retries.time", Clock(monkeypatch))
    with pytest.raises(RewardUnavailableError, match="CUDA error"):
        judged(judge, shades(1))
    assert len(fake.asked) == 3


def test_requests_in_flight_and_per_second_are_limited(fake: FakeJudge) -> None:
    judge = VlmJudge(fake.endpoint, MODEL, in_flight=3)
    fake.hold.clear()
    found: list[torch.Tensor] = []
    callers = [threading.Thread(target=lambda i=i: found.append(judged(judge, shades(8), f"{i}"))) for i in range(2)]
    for caller in callers:
        caller.start()
    while len(fake.asked) < 3:
        assert any(caller.is_alive() for caller in callers)
    fake.hold.set()
    for caller in callers:
        caller.join()
    assert (fake.most, len(fake.asked)) == (3, 16)
    assert torch.equal(found[0], found[1])
    began = time.monotonic()
    judged(VlmJudge(fake.endpoint, MODEL, per_second=20), shades(4))
    assert time.monotonic() - began > 2.9 / 20


def test_a_limit_of_the_endpoint_holds_all_requests(fake: FakeJudge, monkeypatch: pytest.MonkeyPatch) -> None:
    judge, clock = VlmJudge(fake.endpoint, MODEL, patience=600), Clock(monkeypatch)
    clock.goes.clear()
    fake.mode, fake.faulty = "limited", 1
    limited = start(judge._judge(0, grey(), "a"))
    until(lambda: len(clock.slept) == 1)
    held = start(judge._judge(1, grey(1), "a"))
    until(lambda: len(clock.slept) == 2)
    assert clock.slept == [7.0, 7.0]
    assert len(fake.asked) == 1
    clock.goes.set()
    assert limited.result(600) < held.result(600)


def test_the_digest_is_of_model_question_and_parser(fake: FakeJudge, monkeypatch: pytest.MonkeyPatch) -> None:
    same = VlmJudge(fake.endpoint, MODEL).digest
    assert same.startswith("sha256:")
    assert VlmJudge(f"{fake.endpoint}/", MODEL, in_flight=2, timeout=9, per_second=50, device="cuda").digest == same
    changes = {"model": "another", "template": "Rate this: {prompt}", "label": "Score:", "lowest": 0, "highest": 9}
    changes |= {"max_tokens": 17, "logprobs": False, "temperature": None, "extra_body": {"seed": 1}}
    changes |= {"token_limit": "max_completion_tokens"}
    others = {VlmJudge(fake.endpoint, **{"model": MODEL, name: value}).digest for name, value in changes.items()}
    assert len(others | {same}) == 11
    monkeypatch.setattr("solrl_remote.vlm_judge.source_digest", lambda thing: f"another {thing.__name__}")
    assert VlmJudge(fake.endpoint, MODEL).digest != same


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "judge"}, "got model 'judge'; expected one that http"),
        ({"template": "Rate this: {caption}"}, "expected {prompt} where the prompt belongs"),
        ({"lowest": 5, "highest": 1}, "expected numbers that increase"),
        ({"max_tokens": 0}, "got max_tokens 0"),
        (
            {"token_limit": "tokens"},
            "got token_limit 'tokens'; expected one of ['max_tokens', 'max_completion_tokens']",
        ),
        ({"extra_body": {"stream": True, "seed": 1}}, "got ['stream'] in extra_body"),
        ({"timeout": 0}, "expected timeout and per_second above 0"),
        ({"per_second": 0}, "expected timeout and per_second above 0"),
        ({"in_flight": 0}, "in_flight of at least 1"),
        ({"endpoint": "127.0.0.1:8000"}, "got endpoint of the judge '127.0.0.1:8000'; expected http://HOST:PORT"),
        ({"endpoint": "http://user:secret@host"}, "contains a user or password"),
    ],
)
def test_invalid_options_are_refused(fake: FakeJudge, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=r"got|contains") as caught:
        VlmJudge(**{"endpoint": fake.endpoint, "model": MODEL, **options})
    assert said in str(caught.value)
    assert "secret" not in str(caught.value)


def test_an_endpoint_is_one_and_accepts_the_environment_s_key(fake: FakeJudge, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RewardUnavailableError, match=r"answered 404 to /models: .*such as http://HOST/v1"):
        VlmJudge(fake.endpoint.removesuffix("/v1"), MODEL)
    with pytest.raises(RewardUnavailableError, match=r"gave no answer \(ConnectError"):
        VlmJudge(f"http://127.0.0.1:{free_port()}/v1", MODEL)
    fake.key = KEY
    with pytest.raises(RewardUnavailableError, match=f"answered 401 .*Incorrect API key.* in {TOKEN}"):
        VlmJudge(fake.endpoint, MODEL)
    monkeypatch.setenv(TOKEN, KEY)
    assert len(judged(VlmJudge(fake.endpoint, MODEL), shades(2))) == 2


def test_the_key_stays_secret(
    fake: FakeJudge, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(TOKEN, "sk-" + "k3y" * 20)
    app = create_app(settings(fake.endpoint, patience=0))
    caplog.handler.setFormatter(TextFormatter())
    caplog.set_level(logging.DEBUG)
    with client_at(app) as client:
        fake.mode = "echoing"
        answer = ask(client, body(pictures(1), JUDGE))
    assert "not allowed" in problem(answer)["detail"]
    for text in (answer.text, caplog.text):
        assert "answered 401" in text
        assert "sk-" not in text
    with pytest.raises(RewardUnavailableError) as caught:
        VlmJudge(fake.endpoint, MODEL)
    assert "sk-" not in str(caught.value)


def defaults(**options: Any) -> PlainDefaults:
    """A model whose `solrl.json` gives options to the judge."""
    return PlainDefaults(torch.device("cpu"), ModelOptions(rewards={JUDGE: options}))


def test_a_model_cannot_choose_who_judges(fake: FakeJudge) -> None:
    with pytest.raises(ValueError, match=r"solrl\.json gives 'endpoint' for reward 'vlm_judge'"):
        load_reward(JUDGE, defaults(endpoint=fake.endpoint, model=MODEL))
    with pytest.raises(ValueError, match=r"solrl\.json gives 'endpoint'"):
        load_reward(JUDGE, defaults(endpoint="http://other"), {"endpoint": fake.endpoint, "model": MODEL})
    found = RewardSet.load([JUDGE], defaults(highest=4), {JUDGE: {"endpoint": fake.endpoint, "model": MODEL}})
    assert found.digests()["reward:vlm_judge"] == VlmJudge(fake.endpoint, MODEL, highest=4).digest
    assert found.computed_here == ()
    assert fake.asked == []


def settings(address: str, **options: Any) -> RewardSettings:
    all_options = {JUDGE: {"endpoint": address, "model": MODEL, **options}}
    return RewardSettings(rewards=(JUDGE,), reward_options=all_options, device="cpu")


def test_a_reward_service_serves_a_judge(fake: FakeJudge) -> None:
    with client_at(create_app(settings(fake.endpoint, patience=0))) as client:
        remote = connect_reward(JUDGE, {"at": str(client.base_url)})
        assert isinstance(remote, RemoteReward)
        assert remote.digest == VlmJudge(fake.endpoint, MODEL).digest
        assert torch.allclose(judged(remote, shades(3)), exact(shades(3)), atol=1e-5)
        assert remote.timeout == 20 + 60, "the judge's timeout is 60 s"
        assert not remote.advice
        fake.mode = "broken"
        with pytest.raises(RewardUnavailableError, match=r"answered 503 .*CUDA error"):
            judged(remote, pictures(2))
        shown = client.get("/metrics").text
        (requests,) = re.findall(r'^solrl_reward_costs_total{kind="requests",reward="vlm_judge"} (.+)', shown, re.M)
        assert float(requests) >= len(fake.asked), "a call that fails may end others before they arrive"
        assert 'solrl_reward_costs_total{kind="prompt_tokens",reward="vlm_judge"}' in shown


def test_no_client_gives_up_before_the_judge_is_given_up(fake: FakeJudge, caplog: pytest.LogCaptureFixture) -> None:
    """A reward service says how long its judge may take, and a client waits that long by default."""
    with serving(create_app(settings(fake.endpoint, patience=90, timeout=30))) as address:
        assert connect_reward(JUDGE, {"at": address}).timeout == 20 + 90 + 30
        assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
        short = connect_reward(JUDGE, {"at": address, "timeout": 119})
        assert short.timeout == 119
        assert "timeout is 119 s" in short.advice
        assert "may wait 120 s for another service" in short.advice
        assert short.advice in caplog.text
        assert connect_reward(JUDGE, {"at": address, "timeout": 120}).advice == ""
