"""Secrets of this process, which no text repeats."""

import json
import logging
from pathlib import Path

import pytest
from solrl_client.tokens import bearer_token
from solrl_http.logs import JsonFormatter, TextFormatter
from solrl_proto.printable import printable
from solrl_proto.problems import Problem, ProblemKind
from solrl_proto.secrets import CUT, register_secret, without_secrets
from solrl_rollout.store.redis_store import RedisRunStore

JUDGE, REWARD, REDIS, HUB, FILE = "sk-judge-1", "reward-token-2", 'pass/"<word>', "hf_4444", "hf_in_a_file"
SERVICE = "solrl_" + "aB3-_" * 8 + "abc"


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[str, ...]:
    """All secrets of a process, as it gets them."""
    monkeypatch.setenv("SOLRL_JUDGE_TOKEN", JUDGE)
    (tmp_path / "token").write_text(f"{REWARD}\n")
    monkeypatch.setenv("SOLRL_REWARD_TOKEN_PATH", str(tmp_path / "token"))
    assert (bearer_token("SOLRL_JUDGE_TOKEN"), bearer_token("SOLRL_REWARD_TOKEN")) == (JUDGE, REWARD)
    RedisRunStore("redis://me:pass%2F%22%3Cword%3E@localhost:1/0")
    monkeypatch.setenv("HF_TOKEN", HUB)
    (tmp_path / "hub").write_text(f"{FILE}\n")
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "hub"))
    return JUDGE, REWARD, REDIS, HUB, FILE, SERVICE


def test_every_secret_is_cut_out_of_texts(secrets: tuple[str, ...]) -> None:
    for secret in secrets:
        assert without_secrets(f"Bearer {secret}, again {secret}.") == f"Bearer {CUT}, again {CUT}."
        assert printable(f"Bearer {secret}") == f"Bearer {CUT}"
    assert without_secrets("solrl_rollout serves a word") == "solrl_rollout serves a word"
    forms = (REDIS, json.dumps({"a": REDIS}), "pass%2F%22%3Cword%3E", "pass/&quot;&lt;word&gt;", repr({"a": REDIS}))
    for form in forms:
        assert "word" not in without_secrets(form), form
    assert JUDGE[:5] not in printable("x" * 95 + JUDGE + "y" * 100, 100), "it is cut out before the text is shortened"
    register_secret("a b")
    assert without_secrets("a b c") == "a b c", "a few characters are no secret"


def test_problems_have_no_secrets(secrets: tuple[str, ...]) -> None:
    for secret in secrets:
        given = ProblemKind.REWARD_FAILED.problem(
            secret, where=secret, got={"head": [f"Bearer {secret}", 1]}, expected=secret, action=secret
        )
        read = Problem.model_validate_json(
            json.dumps({"type": "a:b", "title": secret, "status": 500, "detail": secret})
        )
        assert secret not in str(given) + repr(given) + str(read)
        assert given.got == {"head": [f"Bearer {CUT}", 1]}


@pytest.mark.parametrize("formatter", [JsonFormatter(), TextFormatter()], ids=["json", "text"])
def test_logs_have_no_secrets(formatter: logging.Formatter, secrets: tuple[str, ...]) -> None:
    for secret in secrets:
        try:
            raise RuntimeError(f"refused {secret}")
        except RuntimeError as error:
            info = (type(error), error, error.__traceback__)
        record = logging.LogRecord("a", logging.ERROR, "a.py", 1, "got %s", (secret,), info)
        record.fields = {"detail": [secret]}
        line = formatter.format(record)
        assert secret not in line
        assert json.dumps(secret)[1:-1] not in line
        assert f"got {CUT}" in line
