"""Refusals for want of a token: the trainer says where it takes its own from."""

from collections.abc import Iterator

import pytest
from solrl_trainer.__main__ import main
from tests.services.security_helpers import Guarded, guarded_service
from tests.support.typed import refused, typed
from tests.trainer.hostile_service import Answer, hostile_service

PLACES = "the token is taken from SOLRL_TOKEN, or from the file that SOLRL_TOKEN_PATH names"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded_service(tmp_path_factory.mktemp("tokens")) as running:
        yield running


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOLRL_TOKEN", raising=False)
    monkeypatch.delenv("SOLRL_TOKEN_PATH", raising=False)


def test_who_is_not_known_is_told_the_variable(guarded: Guarded) -> None:
    for words in (["runs", "list"], ["run", "--iterations", "1", "--dry-run"]):
        message = refused(main, *words, "--rollout-url", guarded.service.url)
        assert "no bearer token was sent" in message
        assert message.rstrip().endswith(PLACES)


@pytest.mark.parametrize(("token", "lacking"), [("rollout", "'push'"), ("push", "'rollout'"), ("a", None)])
def test_a_run_without_a_scope_is_refused_before_loading(guarded: Guarded, token: str, lacking: str | None) -> None:
    given, url = {"SOLRL_TOKEN": guarded.tokens[token], "COLUMNS": "1000"}, ("--rollout-url", guarded.service.url)
    run = typed(main, "run", "--dry-run", *url, **given)
    assert (f"lacks the scope {lacking}" in run.stderr) == (lacking is not None)
    assert (PLACES in run.stderr) == (lacking is not None)
    assert (run.returncode == 0) == (lacking is None)


@pytest.mark.parametrize(("status", "told"), [(401, True), (403, True), (404, False)])
def test_a_proxys_refusal_names_it_too(status: int, told: bool) -> None:
    with hostile_service() as service:
        service.answers = [Answer(status=status, parts=(b"<html>no</html>",))]
        assert (PLACES in refused(main, "runs", "list", "--rollout-url", service.url)) == told
