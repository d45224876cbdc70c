"""The `solrl-rollout` command line: help without heavy imports, one clear message if it cannot start, the doctor."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import redis
from solrl_rollout.__main__ import main
from solrl_rollout.doctor import check, memory_findings, redis_findings
from solrl_rollout.serve import _warn_of_password
from solrl_rollout.settings import RolloutSettings
from tests.services.reward_servers import DIGEST, NAME, Misbehaving, serving
from tests.support.ports import free_port
from tests.support.redis_server import RedisServer
from tests.support.typed import accepted, refused, typed


def here(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in this process."""
    return typed(main, *arguments, COLUMNS="160")


def refusal(*arguments: str, command: str = "serve", **environment: str) -> str:
    """The message of a command that must fail to start."""
    message = refused(main, command, *arguments, COLUMNS="160", **environment)
    assert message.startswith("solrl-rollout: ")
    return message


def test_serve_does_not_start_without_its_redis(tmp_path: Path) -> None:
    port, file = free_port(), tmp_path / "url"
    file.write_text(f"redis://user:secret@127.0.0.1:{port}/0\n")
    message = refusal("--port", "0", "--redis-url", "redis://elsewhere", "--redis-url-file", str(file))
    assert f"127.0.0.1:{port}" in message
    assert "check that Redis runs" in message
    assert "secret" not in message
    assert "got --redis-url-file nofile: No such file" in refusal("--port", "0", "--redis-url-file", "nofile")


def test_too_little_memory_for_a_thread_gets_advice() -> None:
    script = (
        "import resource, threading; from solrl_core.program import run_program\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2**28, 2**28)); threading.stack_size(2**30)\n"
        "run_program('solrl-rollout', str, lambda _: threading.Thread(target=print).start())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 2
    assert "can't start new thread: too little memory, or too many threads; raise `ulimit -v`" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_password_on_the_command_line_causes_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    for arguments in (["--redis-url", "redis://:secret@a"], ["--redis-url=redis://:secret@a"], []):
        caplog.clear()
        _warn_of_password(RolloutSettings(redis_url="redis://:secret@a"), arguments)
        assert ("--redis-url-file" in caplog.text) == bool(arguments)
        assert "secret" not in caplog.text


def test_serve_refuses_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = refusal("--port", str(port))
    assert f"127.0.0.1:{port}" in message
    assert (
        f"at --port; got {port}; expected 'a free port, which this user may open'; stop the process that uses it"
        in message
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--port", "80000"], "got --port 80000; expected a number less than or equal to 65535"),
        (["--port", "8100", "--retain", "0"], "got --retain 0; expected a number greater than or equal to 1"),
        (["--model", ""], "got model ''; expected [name=]location[@revision]"),
        (["--max-body-bytes", "99999999999"], "raise max_inflight_bytes, or lower max_body_bytes"),
        (["--max-adapter-bytes", "99999999999"], "raise max_inflight_bytes, or lower max_adapter_bytes"),
    ],
)
def test_a_setting_out_of_range_is_one_line(flags: list[str], said: str) -> None:
    for command in ("serve", "doctor"):
        message = refusal(*flags, command=command)
        assert said in message
        assert f"`solrl-rollout {command} --help`" in message
        assert len(message.splitlines()) == 1


@pytest.mark.parametrize("host", ["nosuchhost.invalid", "192.0.2.1", "zz::1", "\u00e9..x"])
def test_a_host_that_is_not_of_this_machine_is_named(host: str) -> None:
    message = refused(main, "serve", "--host", host, "--allow-anonymous", COLUMNS="160")
    assert f"at --host; got {host!r}; expected 'a name or address of this machine'" in message
    assert "0.0.0.0" in message


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model", "maxi-sana"], ["maxi-sana", "mini-sana"]),
        (["--model", "mini-sanna"], ["(did you mean 'mini-sana'?)"]),
        (["--rewards", "clipscore", "beauty"], ["beauty", "clipscore"]),
        (["--precision", "fp8"], ["precision fp8: this CPU has no FP8 matrix units", "use bf16, or nvfp4"]),
    ],
)
def test_serve_refuses_an_unknown_name_and_lists_the_known_ones(flags: list[str], said: list[str]) -> None:
    message = refusal("--port", "0", "--device", "cpu", *flags)
    assert all(part in message for part in said), message


def test_serve_refuses_a_bad_environment() -> None:
    message = refusal(SOLRL_PORT="70000")
    assert "in the environment, got SOLRL_PORT=70000; expected a number less than or equal to 65535" in message
    for setting in ({"SOLRL_REWARD_OPTIONS": "{bad"}, {"SOLRL_MAX_BODY_BYTES": "99999999999"}):
        message = refusal(**setting)
        assert "in the environment, " in message
        assert next(iter(setting)).removeprefix("SOLRL_").lower() in message


def test_the_doctor_finds_no_error_on_this_machine_and_checks_redis_as_a_start_does(own_redis: RedisServer) -> None:
    def found() -> list[tuple[str, str]]:
        findings = (one for one in redis_findings(own_redis.url) if one.subject == "redis settings")
        return [(one.state, one.action) for one in findings]

    done = accepted(main, "doctor", "--port", "0", "--redis-url", own_redis.url, COLUMNS="160")
    for part in ("python", "torch", "precision nvfp4", "precision bf16", "reward clipscore"):
        assert part in done.stdout
    assert "missing" not in done.stdout
    assert "set appendonly yes" in done.stdout  # this Redis loses everything in a crash
    with redis.Redis.from_url(own_redis.url) as client:
        client.config_set("appendonly", "yes")
        assert [state for state, _ in found()] == ["ok"]
        client.config_set("appendfsync", "no")
        client.config_set("maxmemory", "100mb")
        client.config_set("maxmemory-policy", "allkeys-lru")
    assert found() == [("warn", "set it to noeviction"), ("warn", "set it to everysec or always")]


@pytest.mark.parametrize(("held", "state"), [(8 * 2**30, "ok"), (2 * 2**30, "missing")])
def test_the_doctor_says_whether_the_models_fit(held: int, state: str) -> None:
    (found,) = memory_findings(RolloutSettings(model=("mini-sana", "mini-sd3"), precision="bf16"), held)
    assert found.state == state
    assert f" MiB by plan at bf16, of {held >> 30}.00 GiB" in found.text


def test_the_doctor_names_missing_parts() -> None:
    redis = f"redis://127.0.0.1:{free_port()}"
    done = here("doctor", "--port", "0", "--model", "maxi-sana", "--redis-url", redis, "--rewards", "beauty")
    assert done.returncode == 1
    assert done.stdout.count("missing") == 3
    assert "mini-sana" in done.stdout
    for words, said in (
        ("--device cuda:9", "got device cuda:9, and PyTorch finds"),
        ("--gpus 4096", "got --gpus 4096, and PyTorch"),
    ):
        done = here("doctor", "--port", "0", *words.split())
        assert done.returncode == 1
        assert said in done.stdout
        assert "Traceback" not in done.stderr
    assert "3 processes, on cpu" in here("doctor", "--port", "0", "--device", "cpu", "--workers", "3").stdout


def test_doctor_and_start_refuse_options_of_a_reward_that_is_not_named() -> None:
    words = ("--port", "0", "--device", "cpu", "--reward-options", '{"clipscor": {"model": "a"}}')
    said = "got options for reward 'clipscor' (did you mean 'clipscore'?)"
    assert said in refusal(*words)
    done = here("doctor", *words)
    assert done.returncode == 1
    assert said in " ".join(done.stdout.split())  # the table folds long texts


def test_the_doctor_asks_reward_servers() -> None:
    app = Misbehaving()
    app.max_latency_s = 30
    with serving(app) as address:
        away = f"http://127.0.0.1:{free_port()}"
        settings = RolloutSettings(
            device="cpu",
            model=("mini-sana", "mini-sd3"),
            rewards=(f"{NAME}@{address}", f"hpsv2@{address}", f"clipscore@{away}", "pickscore@ftp://nowhere"),
            reward_options={NAME: {"timeout": 25}},
        )
        found = [one for one in check(settings) if one.subject.startswith("reward ")]
    assert app.asked == ["/v1/rewards"] * 2, "each reward is asked for once, for both models"
    rows = {one.subject: one for one in found}
    assert {subject: row.state for subject, row in rows.items()} == {
        f"reward server {address}": "ok",
        f"reward {NAME}": "ok",
        f"reward {NAME}'s timeout": "warn",
        "reward hpsv2": "missing",
        f"reward server {away}": "missing",
        "reward pickscore": "missing",
    }
    assert rows[f"reward {NAME}"].text == f"computed by the server at {address}, digest {DIGEST}"
    assert "may wait 30 s for another service" in rows[f"reward {NAME}'s timeout"].text
    assert "a server started with --rewards hpsv2" in rows["reward hpsv2"].action
    assert "solrl-reward serve --rewards clipscore" in rows[f"reward server {away}"].action
    assert "expected http://HOST:PORT" in rows["reward pickscore"].text
