"""Commands, variables and volumes in docs/deploy.md exist."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from command_checks import parsed
from proof.compose import load
from solrl_rollout.settings import RolloutSettings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "deploy.md").read_text()
DOCUMENT = load(ROOT / "docker-compose.yml", {})
SERVICES: dict[str, Any] = DOCUMENT["services"]
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]
COMPOSE = [line for line in COMMANDS if "docker compose" in line]
INLINE = re.findall(r"`(docker compose [^`]+)`", PAGE)
VERBS = {"up", "down", "cp", "run", "exec", "build", "logs", "stop", "ps", "restart"}
WITH_VALUE = {"--exit-code-from", "--entrypoint"}


@pytest.mark.parametrize("line", [*COMPOSE, *INLINE])
def test_a_compose_command_names_services_of_its_profile(line: str) -> None:
    words = [
        word for word in shlex.split(line.partition(" > ")[0].partition(" < ")[0]) if not re.match("[A-Z_]+=", word)
    ]
    assert words[:2] == ["docker", "compose"]
    options, words = {}, words[2:]
    while words[0].startswith("--"):
        options[words[0]], words = words[1], words[2:]
    profile, (verb, *rest) = options.pop("--profile", None), words
    assert options.keys() <= {"--env-file", "--project-name"}
    assert profile is None or any(profile in body.get("profiles", ()) for body in SERVICES.values())
    inside = {name for name, body in SERVICES.items() if profile in body.get("profiles", [profile])}
    assert verb in VERBS
    plain = [word for at, word in enumerate(rest) if not word.startswith("-") and rest[at - 1] not in WITH_VALUE]
    named = plain[:1] if verb in ("run", "exec") else [word.partition(":")[0] for word in plain if word != "."]
    assert set(named) <= inside
    assert verb not in ("run", "exec", "cp") or named


def test_other_commands_exist() -> None:
    others = [shlex.split(line) for line in COMMANDS if line not in COMPOSE]
    paths = [word for words in others for word in words if word.startswith(("scripts/", "deploy/"))]
    locks = {"deploy/vllm-omni.lock", "deploy/rewards/imagereward/requirements.lock"}
    assert {"scripts/prove-images", "deploy/make-secrets", "deploy/gpu.env", *locks} == set(paths)
    assert all((ROOT / path).stat().st_mode & 0o111 for path in paths if not path.endswith((".env", ".lock")))
    assert all((ROOT / path).is_file() for path in paths)


@pytest.mark.parametrize("line", [line for line in COMPOSE if " token " in line])
def test_token_commands_are_valid(line: str) -> None:
    words = shlex.split(line.partition(" > ")[0])
    assert parsed(["solrl-rollout", *words[words.index("token") :]])


def test_variables_and_volumes_are_those_of_the_compose_file() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    fields = {f"SOLRL_{name.upper()}" for name in RolloutSettings.model_fields}
    for name in re.findall(r"`(SOLRL_[A-Z_]+|BASE|TORCH|TORCH_INDEX|ROLLOUT_URL)`", PAGE):
        assert name in fields or f"${{{name}" in text, name
    for name in DOCUMENT["volumes"]:
        assert f"| `{name}` |" in PAGE
    for secret, entry in DOCUMENT["secrets"].items():
        assert f"| `{secret}` |" in PAGE or "/demo/" in entry["file"]
