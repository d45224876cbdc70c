"""Commands, variables, volumes and YAML on the pages of operators fit the compose file and the programs."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from proof.compose import load
from solrl_rollout.settings import RolloutSettings
from tests.docs.command_checks import parsed
from tests.docs.fences import ROOT, blocks
from torch.distributed.run import get_args_parser

PAGES = ("five-people", "deploy", "memory", "monitor", "failures", "security", "scale-out")
PAGE = "".join((ROOT / f"docs/{name}.md").read_text() for name in PAGES)
DOCUMENT = load(ROOT / "docker-compose.yml", {})
SERVICES: dict[str, Any] = DOCUMENT["services"]


def fenced(language: str) -> list[str]:
    return [block.text for name in PAGES for block in blocks(f"docs/{name}.md", language)]


COMMANDS = [line for text in fenced("sh") for line in text.replace("\\\n", " ").splitlines()]
COMPOSE = [line for line in COMMANDS if "docker compose" in line]
INLINE = re.findall(r"`(docker compose [^`]+)`", PAGE)
VERBS = {"up", "down", "cp", "rm", "run", "exec", "build", "logs", "stop", "ps", "restart"}
WITH_VALUE = {"--exit-code-from", "--entrypoint", "--name", "--volume"}
PATHS = json.loads((ROOT / "proto" / "openapi.json").read_text())["paths"]


@pytest.mark.parametrize("line", [*COMPOSE, *INLINE])
def test_a_compose_command_names_services_of_its_profile(line: str) -> None:
    words = [word for word in shlex.split(re.split(" [<>|] ", line)[0]) if not re.match("[A-Z_]+=", word)]
    assert words[:2] == ["docker", "compose"]
    profiles, words = set(), words[2:]
    while words[0].startswith("--"):
        assert words[0] in ("--profile", "--env-file", "--project-name")
        profiles |= {words[1]} if words[0] == "--profile" else set()
        words = words[2:]
    verb, *rest = words
    known = {profile for body in SERVICES.values() for profile in body.get("profiles", ())}
    profiles = known if profiles == {"*"} else profiles
    assert profiles <= known
    inside = {name for name, body in SERVICES.items() if "profiles" not in body or profiles & set(body["profiles"])}
    assert verb in VERBS
    plain = [word for at, word in enumerate(rest) if not word.startswith("-") and rest[at - 1] not in WITH_VALUE]
    named = plain[:1] if verb in ("run", "exec") else [word.partition(":")[0] for word in plain if word != "."]
    assert set(named) <= inside
    assert verb not in ("run", "exec", "cp") or named


def test_other_commands_exist() -> None:
    others = [shlex.split(line) for line in COMMANDS if line not in COMPOSE]
    paths = [word for words in others for word in words if word.startswith(("scripts/", "deploy/"))]
    files = {"deploy/gpu.env", "deploy/alerts.yml", "deploy/kubernetes.yaml", "deploy/vllm-omni.lock"}
    files |= {"deploy/prometheus.yml", "deploy/alertmanager.yml"}
    assert {"scripts/prove-images", "deploy/make-secrets", "deploy/backup", "deploy/gpus", *files} == set(paths)
    assert all((ROOT / path).stat().st_mode & 0o111 for path in set(paths) - files)
    assert all((ROOT / path).is_file() for path in paths)


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("solrl-")])
def test_commands_of_the_programs_are_valid(line: str) -> None:
    assert parsed(shlex.split(line))


@pytest.mark.parametrize("line", [line for line in COMPOSE if " token " in line])
def test_token_commands_are_valid(line: str) -> None:
    words = shlex.split(line.partition(" > ")[0])
    assert parsed(["solrl-rollout", *words[words.index("token") :]])


def test_variables_volumes_and_lines_of_env_are_those_of_the_compose_file() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    fields = {f"SOLRL_{name.upper()}" for name in RolloutSettings.model_fields}
    for name in re.findall(r"`(SOLRL_[A-Z_]+|BASE|TORCH|TORCH_INDEX|EXTRAS|ROLLOUT_URL)`", PAGE):
        assert name in fields or re.search(rf"\$\{{{name}\b|^ +{name}(_PATH)?:", text, re.MULTILINE), name
    for name in DOCUMENT["volumes"]:
        assert f"| `{name}` |" in PAGE
    for secret, entry in DOCUMENT["secrets"].items():
        assert f"| `{secret}` |" in PAGE or "/demo/" in entry["file"]
    lines = [line for block in fenced("ini") for line in block.splitlines()]
    assert len(lines) >= 2
    assert all(re.search(rf"\$\{{{line.partition('=')[0]}[:}}-]", text) for line in lines)


def test_deploy_lists_every_variable_of_the_compose_file() -> None:
    page = (ROOT / "docs/deploy.md").read_text()
    named = set(re.findall(r"\$\{(\w+)", (ROOT / "docker-compose.yml").read_text()))
    assert {name for name in named if f"`{name}`" not in page} == set()


@pytest.mark.parametrize("page", ["deploy", "five-people"])
def test_a_trainer_s_folder_of_secrets_is_made_before(page: str) -> None:
    lines = "".join(block.text for block in blocks(f"docs/{page}.md", "sh"))
    folders = set(re.findall(r"SOLRL_SECRETS=\./(\S+)", lines))
    assert folders
    for folder in folders:
        before = lines.partition(f"SOLRL_SECRETS=./{folder}")[0]
        alice = folder.replace("$person", "alice")  # one of the people for whom the page's loops run
        assert f"deploy/make-secrets {alice}\n" in before or 'deploy/make-secrets "secrets/$person"\n' in before
        assert f"> {alice}/token\n" in before or '> "secrets/$person/token"\n' in before


@pytest.mark.parametrize("line", [line for line in COMPOSE if " --entrypoint " in line])
def test_several_ranks_run_in_the_images_python_one_on_each_gpu(line: str) -> None:
    """Not by torchrun, whose first line names the Python for which NVIDIA installed it: the system's."""
    words = shlex.split(line.partition(" > ")[0])
    program, service, *rest = words[words.index("--entrypoint") + 1 :]
    assert service == "trainer"
    if program == "tar":
        return
    assert (program, rest[:2]) == ("python3", ["-m", "torch.distributed.run"])
    options = get_args_parser().parse_args(rest[2:])
    assert (options.module, options.training_script) == (True, "solrl_trainer")
    (gpus,) = [word.partition("=")[2].split(",") for word in words if word.startswith("SOLRL_TRAINER_GPU=")]
    assert len(set(gpus)) == int(options.nproc_per_node)
    assert parsed(["solrl-train", *options.training_script_args]).resume.parts[:2] == ("/", "outputs")


OVERRIDES = [text for text in fenced("yaml") if text.startswith("services:")]


@pytest.mark.parametrize("text", OVERRIDES)
def test_an_override_fits_the_schema_and_the_services(text: str, tmp_path: Path) -> None:
    (tmp_path / "docker-compose.override.yml").write_text(text)
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, tmp_path / "docker-compose.override.yml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for name, body in yaml.safe_load(text)["services"].items():
        assert name in SERVICES or "image" in body
        if "healthcheck" in body:
            *before, asked = body["healthcheck"]["test"]
            assert [*before, asked.replace("/live", "/ready")] == SERVICES[name]["healthcheck"]["test"]
            assert "get" in PATHS["/health/live"]


def test_kubernetes_starts_the_service_as_compose_does() -> None:
    """Command, probes, port, user, time to stop, and files of the secret."""
    deployment, service = yaml.safe_load_all((ROOT / "deploy/kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    settings = parsed(["solrl-rollout", *container["args"]]).settings
    (port,) = (entry["containerPort"] for entry in container["ports"])
    assert (settings.host, settings.port, service["spec"]["ports"]) == ("0.0.0.0", port, [{"port": port}])
    selected = deployment["spec"]["selector"]["matchLabels"]
    assert service["spec"]["selector"] == selected == pod["metadata"]["labels"]
    probes = {name: container[f"{name}Probe"] for name in ("startup", "liveness", "readiness")}
    asked = {name: probe["httpGet"]["path"] for name, probe in probes.items()}
    assert asked == {"startup": "/health/live", "liveness": "/health/live", "readiness": "/health/ready"}
    assert all("get" in PATHS[path] for path in asked.values())
    assert all(p["httpGet"]["port"] == port and p["timeoutSeconds"] > settings.live_timeout for p in probes.values())
    assert probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"] == 7200
    rollout = SERVICES["rollout"]
    assert rollout["healthcheck"]["start_period"] == "2h"
    assert f"{pod['spec']['terminationGracePeriodSeconds']}s" == rollout["stop_grace_period"]
    user = f"{pod['spec']['securityContext']['runAsUser']}:{pod['spec']['securityContext']['fsGroup']}"
    assert (ROOT / "Dockerfile.rollout").read_text().count(f"USER {user}\n") == 2
    mounted = {entry["name"]: entry["mountPath"] for entry in container["volumeMounts"]}
    assert mounted.keys() == {volume["name"] for volume in pod["spec"]["volumes"]}
    files = [settings.redis_url_file, settings.token_file, *(Path(entry["value"]) for entry in container["env"])]
    (made,) = [line for line in COMMANDS if line.startswith("kubectl create ")]
    assert {f"--from-file={path.name}" for path in files} <= set(made.split())
    assert {str(path.parent) for path in files} == {mounted["secrets"]}
