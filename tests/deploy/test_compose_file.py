"""docker-compose.yml against the Compose schema, and against the programs that it starts."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from proof.compose import load
from pydantic_settings import BaseSettings
from solrl_http.serving import check_exposure
from solrl_http.settings import SECRETS
from solrl_http.tokens import TokenFileError
from solrl_proto.problems import ProblemError
from solrl_remote import vlm_judge
from solrl_reward.settings import RewardSettings
from solrl_rollout.settings import RolloutSettings
from solrl_trainer.commands import demo
from solrl_trainer.settings.presets import resolve
from tests.docs.command_checks import parsed
from tests.docs.fences import blocks, commands

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docker-compose.yml"
GPU_SETTINGS = dict(
    line.split("=", 1) for line in (ROOT / "deploy" / "gpu.env").read_text().splitlines() if not line.startswith("#")
)
DOCUMENT = load(FILE, {})
SERVICES: dict[str, dict[str, Any]] = DOCUMENT["services"]
WITH_GPUS: dict[str, dict[str, Any]] = load(FILE, GPU_SETTINGS)["services"]
OURS = [name for name, body in SERVICES.items() if "build" in body]
SETTINGS: dict[str, type[BaseSettings]] = {
    "rollout": RolloutSettings,
    "reward": RewardSettings,
    "imagereward": RewardSettings,
}
SERVING = list(SETTINGS)
TRAINING = [name for name in OURS if name not in SERVING]


def test_the_file_follows_the_compose_specification() -> None:
    """By the schema that Docker publishes, which the package carries."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(FILE)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_plain_up_starts_redis_and_a_service_of_a_miniature() -> None:
    assert {name for name, body in SERVICES.items() if "profiles" not in body} == {"redis", "rollout"}
    environment = SERVICES["rollout"]["environment"]
    assert (environment["SOLRL_MODEL"], environment["SOLRL_REWARDS"]) == (demo.MODEL, demo.REWARD)
    assert SERVICES["rollout"]["runtime"] == "runc"
    build = SERVICES["rollout"]["build"]["args"]
    assert build["TORCH_INDEX"].endswith("/cpu")
    assert build["EXTRAS"] == demo.REWARD
    for secret in DOCUMENT["secrets"].values():
        assert (ROOT / secret["file"]).is_file(), "so that nothing has to be made before"


def test_the_settings_of_a_gpu_node_give_a_gpu_and_require_tokens() -> None:
    """By deploy/gpu.env, whose every line counts."""
    rollout, trainer = WITH_GPUS["rollout"], WITH_GPUS["trainer"]
    assert rollout["runtime"] == trainer["runtime"] == "nvidia"
    assert rollout["environment"]["NVIDIA_VISIBLE_DEVICES"] != trainer["environment"]["NVIDIA_VISIBLE_DEVICES"]
    assert rollout["environment"]["SOLRL_GPUS"] == "all"
    assert "SOLRL_GPUS" not in {key for key, value in SERVICES["rollout"]["environment"].items() if value}
    assert rollout["environment"]["SOLRL_TOKEN_FILE"] == "/tokens/tokens.json"
    assert rollout["environment"]["SOLRL_ALLOW_ANONYMOUS"] == "0", "so that a lost token file is an error"
    dockerfile = (ROOT / "Dockerfile.rollout").read_text()
    assert f"ARG BASE={rollout['build']['args']['BASE']}\n" in dockerfile
    assert rollout["build"]["args"] == trainer["build"]["args"]
    assert (rollout["build"]["args"]["TORCH"], rollout["build"]["args"]["TORCH_INDEX"]) == ("", "")
    text = FILE.read_text()
    assert all(f"${{{name}" in text or f"  {name}:\n" in text for name in GPU_SETTINGS)


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_no_privileges_and_no_secret_in_its_environment_or_command(name: str) -> None:
    body = SERVICES[name]
    assert body["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in body["security_opt"]
    assert body["read_only"] is True
    assert (body["pids_limit"] > 0, bool(body["mem_limit"])) == (True, True)
    assert not body.keys() & {"privileged", "cap_add", "network_mode", "pid", "ipc"}
    if name in OURS:
        assert "user" not in body  # the image's
    else:
        assert body["user"] not in ("root", "0", 0)
    body = WITH_GPUS[name]
    for key, value in body.get("environment", {}).items():
        suspicious = any(word in key for word in ("TOKEN", "PASSWORD", "SECRET", "REDIS_URL"))
        assert not suspicious or value.startswith(("/run/secrets/", "/tokens/")), key
    assert "redis://" not in json.dumps(body)
    for source in (entry if isinstance(entry, str) else entry["source"] for entry in body.get("secrets", ())):
        assert DOCUMENT["secrets"][source].keys() == {"file"}


def test_secrets_that_a_command_reads_are_mounted() -> None:
    for name, body in SERVICES.items():
        mounted = {entry if isinstance(entry, str) else entry["target"] for entry in body.get("secrets", ())}
        text = json.dumps([body.get(key) for key in ("command", "environment", "healthcheck")])
        named = {part.split('"')[0].split(")")[0].rstrip("\\") for part in text.split("/run/secrets/")[1:]}
        assert named <= mounted, name


@pytest.mark.parametrize("name", SERVICES)
def test_referenced_files_exist(name: str) -> None:
    body = SERVICES[name]
    if name in OURS:
        assert (ROOT / body["build"]["dockerfile"]).is_file()
    for other, entry in body.get("depends_on", {}).items():
        assert entry["condition"] == "service_healthy"
        assert "healthcheck" in SERVICES[other]
        # One without a profile always starts.
        assert set(SERVICES[other].get("profiles", body.get("profiles", ()))) >= set(body.get("profiles", ()))
    for volume in body.get("volumes", ()):
        source = volume["source"] if isinstance(volume, dict) else volume.split(":")[0]
        assert source in DOCUMENT["volumes"] or source.startswith("./")


def test_images_of_others_have_an_exact_version() -> None:
    for body in SERVICES.values():
        assert "build" in body or re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+", body["image"]), body["image"]


@pytest.mark.parametrize("name", OURS)
def test_a_new_volume_belongs_to_the_user_of_the_image(name: str) -> None:
    """Docker gives an empty named volume the owner of the image's folder."""
    made = re.findall(r"install -d -o solrl -g solrl (.*)", (ROOT / SERVICES[name]["build"]["dockerfile"]).read_text())
    volumes = [f"{v['source']}:{v['target']}" if isinstance(v, dict) else v for v in SERVICES[name]["volumes"]]
    targets = dict(volume.split(":")[:2] for volume in volumes)
    assert {target for source, target in targets.items() if source in DOCUMENT["volumes"]} <= set(made[-1].split())
    caches = [value for key, value in SERVICES[name]["environment"].items() if key.endswith("_CACHE_DIR")]
    assert all(value.startswith("/compiled/") for value in caches)
    assert len(caches) == 2 * ("compiled" in targets) == 2 * (name == "rollout")


@pytest.mark.parametrize("name", SERVING)
def test_health_checks_ask_a_route_that_the_service_has_and_it_has_time_to_finish_accepted_work(name: str) -> None:
    check = SERVICES[name]["healthcheck"]["test"][-1]
    port = SERVICES[name]["environment"]["SOLRL_PORT"]
    route = check.split(f"http://127.0.0.1:{port}")[1].split("'")[0]
    assert "get" in json.loads((ROOT / "proto" / "openapi.json").read_text())["paths"][route]
    compile(check, name, "exec")
    seconds = sum(RolloutSettings.model_fields[field].default for field in ("drain_timeout", "live_timeout"))
    assert int(SERVICES[name]["stop_grace_period"].removesuffix("s")) >= seconds


@pytest.mark.parametrize("variables", [{}, {"SOLRL_LIVE_TIMEOUT": "120"}], ids=["default", "raised"])
def test_the_health_check_waits_longer_than_the_service_does(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    body = load(FILE, variables)["services"]["rollout"]
    (waits,) = re.findall(r"timeout=(.+)\)$", body["healthcheck"]["test"][-1])
    for name, value in body["environment"].items():
        monkeypatch.setenv(name, value)
    assert RolloutSettings().live_timeout < eval(waits, {"os": os}) < 600
    assert body["healthcheck"]["timeout"] == "10m"


def test_a_service_that_is_published_beyond_loopback_starts_only_with_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def settings(**env: str) -> RolloutSettings:
        with monkeypatch.context() as patched:
            for name, value in load(FILE, env)["services"]["rollout"]["environment"].items():
                patched.setenv(name, value)
            return RolloutSettings()

    check_exposure(settings())
    check_exposure(settings(SOLRL_PUBLISH="127.0.0.1"))
    with pytest.raises(ProblemError, match=r"other machines can reach 0\.0\.0\.0"):
        check_exposure(settings(SOLRL_PUBLISH="0.0.0.0"))
    with pytest.raises(TokenFileError):
        check_exposure(settings(SOLRL_PUBLISH="0.0.0.0", SOLRL_TOKEN_FILE="/nowhere/tokens.json"))


def test_only_the_loopback_and_tls_are_published() -> None:
    published = [port for body in SERVICES.values() for port in body.get("ports", ())]
    (tls,) = SERVICES["proxy"]["ports"]
    assert {port for port in published if not port.startswith("127.0.0.1:")} == {tls}
    assert tls.endswith(":8443")
    assert "listen 8443 ssl;" in (ROOT / "deploy/nginx.conf").read_text()


@pytest.mark.parametrize("name", SERVING)
def test_every_variable_is_a_setting(name: str) -> None:
    ours = {key for key in WITH_GPUS[name]["environment"] if key.startswith("SOLRL_")}
    fields = SETTINGS[name].model_fields
    assert ours <= {f"SOLRL_{field.upper()}" for field in fields}
    targets = {entry["target"] for entry in SERVICES[name]["secrets"] if isinstance(entry, dict)}
    assert targets <= {f"solrl_{field}" for field in fields}


def understood(body: dict[str, Any], monkeypatch: pytest.MonkeyPatch, **more: str) -> Any:
    """The settings that a service's program takes from its command and environment."""
    for key, value in (body["environment"] | more).items():
        monkeypatch.setenv(key, value)
    return parsed([*body.get("entrypoint", ["solrl-rollout"]), *body["command"]]).settings


@pytest.mark.parametrize("found", [SERVICES, WITH_GPUS], ids=["plain", "with GPUs"])
def test_the_service_understands_its_command_environment_and_secrets(
    found: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    body = found["rollout"]
    for entry in body["secrets"]:
        if isinstance(entry, dict):
            (tmp_path / entry["target"]).write_text("redis://:word@there:6379\n")
    assert Path("/run/secrets") == SECRETS
    # There is none of that name on every machine.
    monkeypatch.setitem(RolloutSettings.model_config, "secrets_dir", tmp_path)
    settings = understood(body, monkeypatch)
    assert settings.redis_url == "redis://:word@there:6379"
    assert (settings.host, settings.port, settings.log_format) == ("0.0.0.0", 8100, "json")
    assert settings.allow_anonymous is (settings.token_file is None) is (found is SERVICES)


@pytest.mark.parametrize("found", [SERVICES, WITH_GPUS], ids=["plain", "with GPUs"])
def test_the_reward_service_understands_its_command_and_environment(
    found: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    body = found["reward"]
    settings = understood(body, monkeypatch)
    assert (settings.host, settings.port, settings.rewards) == ("0.0.0.0", 8200, ("clipscore",))
    assert settings.allow_anonymous is (settings.token_file is None) is (found is SERVICES)
    assert settings.options_from == ("mini-sana" if found is SERVICES else ""), "published weights on a GPU"
    assert settings.reward_options == {}
    assert body["profiles"] == ["reward"]


def test_options_and_a_key_reach_a_judge_of_the_reward_service(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"vlm_judge": {"endpoint": "http://judge:8000/v1", "model": "qwen"}}
    given = {"SOLRL_REMOTE_REWARDS": "vlm_judge", "SOLRL_REMOTE_REWARD_OPTIONS": json.dumps(options)}
    given |= {"SOLRL_JUDGE_TOKEN_PATH": "/run/secrets/judge_token", "SOLRL_OPTIONS_FROM": ""}
    body = load(FILE, given)["services"]["reward"]
    assert body["environment"][f"{vlm_judge.TOKEN}_PATH"] == "/run/secrets/judge_token"
    settings = understood(body, monkeypatch)
    assert (settings.rewards, settings.reward_options) == (("vlm_judge",), options)


def test_the_packages_imagereward_is_served_under_the_name_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    body = SERVICES["imagereward"]
    dockerfile = (ROOT / body["build"]["dockerfile"]).read_text()
    (rewards,) = re.findall(r"SOLRL_REWARDS=(\S+)$", dockerfile, re.MULTILINE)
    settings = understood(body, monkeypatch, SOLRL_REWARDS=rewards)
    assert settings.sources == {"imagereward": "reward:PublishedImageReward"}
    assert "class PublishedImageReward:" in (ROOT / "deploy/rewards/imagereward/reward.py").read_text()
    assert body["profiles"] == ["imagereward"]


@pytest.mark.parametrize("name", TRAINING)
def test_the_trainer_understands_its_command(name: str) -> None:
    command = parsed(["solrl-train", *SERVICES[name]["command"]])
    assert command.rollout_url.startswith("http://")
    assert command.rollout_url.split("/")[2].split(":")[0] in SERVICES
    assert command.resume.parts[1] == "outputs"
    assert command.preset, "so that the first start of all begins a run"


@pytest.mark.parametrize(
    ("variables", "share", "patience", "guidance"),
    [
        ({}, 1.0, 600.0, 3.5),
        ({"SOLRL_EXPLORE_SHARE": "0.85", "SOLRL_PATIENCE": "28800", "SOLRL_GUIDANCE": "1"}, 0.85, 28800.0, 1.0),
    ],
)
def test_variables_give_a_trainer_its_share_of_exploring_its_patience_and_its_guidance(
    variables: dict[str, str], share: float, patience: float, guidance: float
) -> None:
    command = parsed(["solrl-train", *load(FILE, variables)["services"]["trainer"]["command"]])
    config = resolve(
        command.preset, overrides=[*command.set, "prompts=shapes"], arguments={"rollout_url": command.rollout_url}
    ).config
    assert (config.explore.share, config.patience, config.guidance) == (share, patience, guidance)


def test_a_trainer_trains_as_readme_s_command_for_its_preset_does() -> None:
    """The same guidance, watched reward and guard, whether somebody types README's command or starts the container."""
    command = parsed(["solrl-train", *SERVICES["trainer"]["command"]])
    here = resolve(command.preset, overrides=[*command.set, "prompts=shapes"]).config
    typed = [
        resolve(command.preset, overrides=[*parsed(words).set, "prompts=shapes"]).config
        for block in blocks("README.md", "sh")
        for words in commands(block)
        if words[:4] == ["solrl-train", "run", "--preset", command.preset] and "trial" not in words
    ]
    assert {(str(run.guidance), str(run.evaluate)) for run in typed} == {(str(here.guidance), str(here.evaluate))}


def test_the_demo_is_the_one_of_the_command_line() -> None:
    command = parsed(["solrl-train", *SERVICES["demo"]["command"]])
    other = parsed(["solrl-train", "demo"])
    assert command.set == demo.SETTINGS
    assert SERVICES["demo"]["build"]["args"] == SERVICES["rollout"]["build"]["args"]
    assert (command.preset, command.seed) == (demo.PRESET, other.seed)
