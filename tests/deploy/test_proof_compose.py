"""scripts/prove-images reads docker-compose.yml like a container engine."""

from pathlib import Path

import pytest
from proof.compose import interpolate, load, seconds, services

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$$(cat x) $$A", "$(cat x) $A"),
        ("${A}/$A/${A-x}/${A:-x}", "word/word/word/word"),
        ("<${EMPTY-x}> <${EMPTY:-x}> <${NONE-x}> <${NONE:-x}> <${NONE}>", "<> <x> <x> <x> <>"),
        ("${NONE-https://a.b/c}", "https://a.b/c"),
        ("${NONE:-${A}}", "word"),
    ],
)
def test_variables(text: str, expected: str) -> None:
    assert interpolate(text, {"A": "word", "EMPTY": ""}) == expected


def test_durations() -> None:
    assert [seconds(text) for text in ("10s", "1m30s", "2h", "500ms")] == [10, 90, 7200, 0.5]
    for text in ("", "10", "1 m", "1d"):
        with pytest.raises(ValueError, match="duration"):
            seconds(text)


def test_the_demo_in_its_order() -> None:
    found = services(ROOT / "docker-compose.yml", "demo", {})
    assert [service.name for service in found] == ["redis", "rollout", "demo"]
    redis, rollout, demo = found
    assert "$(cat /run/secrets/redis_password)" in redis.command[-1]
    assert all(path.is_file() for service in found for path in service.secrets.values())
    assert redis.health is not None
    assert redis.health.test[:2] == ("/bin/sh", "-c")
    assert rollout.depends_on == {"redis": "service_healthy"}
    assert (redis.volumes, demo.volumes) == ({"/data": "redis"}, {"/outputs": "outputs"})
    assert rollout.build_arguments["TORCH_INDEX"].startswith("https://")
    assert demo.health is None
    assert services(ROOT / "docker-compose.yml", "demo", {"TORCH_INDEX": ""})[1].build_arguments["TORCH_INDEX"] == ""


def test_a_variable_without_a_value_is_passed_on_if_it_is_set() -> None:
    file = ROOT / "docker-compose.yml"
    assert "SOLRL_TOKEN_FILE" not in load(file, {})["services"]["rollout"]["environment"]
    given = load(file, {"SOLRL_TOKEN_FILE": "/tokens/a"})["services"]["rollout"]["environment"]
    assert given["SOLRL_TOKEN_FILE"] == "/tokens/a"


def test_unsupported_keys_are_an_error(tmp_path: Path) -> None:
    file = tmp_path / "docker-compose.yml"
    file.write_text("services: {a: {image: a, privileged: true}}")
    with pytest.raises(ValueError, match="privileged"):
        services(file, "demo", {})
