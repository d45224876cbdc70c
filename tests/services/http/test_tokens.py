"""The life of a token, from creation to expiry, in the file and at a running service."""

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from solrl_http.tokens import TokenFileError, TokenStore, create_token, parse_lifetime, read_tokens, revoke_token
from solrl_rollout.__main__ import main
from tests.services.security_helpers import Guarded, guarded_service
from tests.support.service_helpers import problem
from tests.support.typed import refused, typed


def token(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return typed(main, "token", *arguments, **environment)


def test_the_command_line_creates_lists_and_revokes_tokens(tmp_path: Path) -> None:
    file = tmp_path / "new" / "tokens.json"
    made = token("create", "--tenant", "a", "--scopes", "rollout", "push", "--expires", "30d", "--file", str(file))
    assert made.returncode == 0, made.stderr
    secret = made.stdout.strip()
    assert secret.startswith("solrl_")
    assert len(secret) >= 6 + 43  # 256 bits in base 64
    assert secret not in made.stderr
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    (kept,) = read_tokens(file)
    assert (kept.tenant, kept.scopes, kept.expired) == ("a", ("rollout", "push"), False)
    assert kept.expires == kept.created + timedelta(days=30)
    assert secret not in file.read_text()

    listed = token("list", SOLRL_TOKEN_FILE=str(file))
    assert [kept.id, "a", "rollout", "push"] == listed.stdout.splitlines()[1].split()[:4]
    assert secret not in listed.stdout
    assert token("revoke", kept.id, "--file", str(file)).returncode == 0
    assert read_tokens(file) == ()
    assert [path.name for path in file.parent.iterdir()] == ["tokens.json"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["create", "--tenant", "../b", "--scopes", "push", "--file", "t.json"], "'../b'; expected a name of 1 to 64"),
        (["create", "--tenant", "b", "--scopes", "root", "--file", "t.json"], "rollout"),
        (["create", "--tenant", "b", "--scopes", "push", "--expires", "soon", "--file", "t.json"], "30d"),
        (["create", "--tenant", "b", "--scopes", "push"], "SOLRL_TOKEN_FILE"),
        (["revoke", "12345678", "--file", "/nowhere/t.json"], "No such file"),
        (["list", "--file", "/nowhere/t.json"], "solrl-rollout token create"),
        (["create", "--tenant", "b", "--scopes", "push", "--file", "/proc/none/t.json"], "check --file"),
    ],
)
def test_the_command_line_names_the_error(arguments: list[str], said: str, tmp_path: Path) -> None:
    arguments = [str(tmp_path / part) if part == "t.json" else part for part in arguments]
    done = token(*arguments)
    assert done.returncode == 2
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "expires" not in done.stdout
    assert not list(tmp_path.iterdir())


def test_lifetimes_are_parsed_and_invalid_ones_refused() -> None:
    lifetimes = {"12h": timedelta(hours=12), "30d": timedelta(days=30), "2w": timedelta(14), "never": None}
    assert {text: parse_lifetime(text) for text in lifetimes} == lifetimes
    for text in ("", "0d", "-1d", "30", "1.5d", "30 d", "d", "99999d", "30d\n"):
        with pytest.raises(ValueError, match="expected a number"):
            parse_lifetime(text)


def test_concurrent_writers_lose_no_token(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    threads = [threading.Thread(target=create_token, args=(file, f"t{i}", ("push",), None)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {one.tenant for one in read_tokens(file)} == {f"t{i}" for i in range(16)}


def test_a_store_accepts_only_the_exact_tokens_of_its_file_as_it_is_now(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    first, made = create_token(file, "a", ("push",), None)
    ring = TokenStore(file)
    second, _ = create_token(file, "b", ("push",), None)
    assert ring.find(second) is not None
    assert ring.find(first) == made
    for other in (first[:-1], first + "x", first.upper(), "", made.sha256, "solrl_", "\udcff"):
        assert ring.find(other) is None
    revoke_token(file, made.id)
    assert ring.find(first) is None
    kept = file.read_text(encoding="utf-8")
    wrong = ("", "{", '{"version": 2, "tokens": []}', kept.replace('"push"', '"everything"'), "[]")
    for broken in (*(text.encode() for text in wrong), kept.encode("utf-16")):
        file.write_bytes(broken)
        with pytest.raises(TokenFileError):
            ring.find(second)
    file.unlink()
    with pytest.raises(TokenFileError):
        ring.find(second)
    for encoding in ("utf-8", "utf-8-sig"):
        file.write_text(kept, encoding=encoding)
        assert ring.find(second) is not None


def test_a_file_is_parsed_again_only_when_its_bytes_change(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    secret, made = create_token(file, "a", ("push",), None)
    store, before = TokenStore(file), file.stat()
    assert store.find(secret) is store.find(secret) is not None
    file.write_bytes(file.read_bytes().replace(made.sha256.encode(), b"0" * 64))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    assert store.find(secret) is None


@pytest.mark.timeout(60)
def test_a_token_a_folder_or_a_fifo_is_told_from_a_missing_token_file(tmp_path: Path) -> None:
    secret, _ = create_token(tmp_path / "tokens.json", "a", ("push",), None)
    bare, fifo = tmp_path / "token", tmp_path / "fifo"
    bare.write_text(f"{secret}\n")
    os.mkfifo(fifo)
    said = {bare: "this is a token, not a file of tokens", tmp_path: "a regular file", fifo: "not a regular file"}
    for path, expected in said.items():
        with pytest.raises(TokenFileError, match=expected) as refused:
            read_tokens(path)
        assert secret not in str(refused.value)
        assert "delete" not in str(refused.value)
        assert "--file" not in str(refused.value)
    ring = TokenStore(tmp_path / "tokens.json")
    fifo.rename(tmp_path / "tokens.json")
    with pytest.raises(TokenFileError):
        ring.find(secret)


def test_a_link_to_the_token_file_stays_a_link(tmp_path: Path) -> None:
    link, file = tmp_path / "link.json", tmp_path / "folder" / "tokens.json"
    link.symlink_to(file)
    create_token(link, "a", ("push",), None)
    create_token(link, "b", ("push",), None)
    assert link.is_symlink()
    assert [one.tenant for one in read_tokens(file)] == ["a", "b"]


MOUNTED = """
import sys
from pathlib import Path
from solrl_http.tokens import TokenStore, revoke_token
file, token_id, secret = Path(sys.argv[1]), *sys.argv[2:]
ring = TokenStore(file)
assert ring.find(secret)
for act in (lambda: revoke_token(file, token_id), lambda: ring.find(secret)):
    try:
        act()
    except ValueError as error:
        print(error, error.__cause__, flush=True)
    input()
"""


@pytest.mark.skipif(
    subprocess.run(["sh", "-c", "unshare -rm true"], check=False).returncode != 0, reason="needs user namespaces"
)
def test_a_file_that_is_mounted_alone_keeps_no_revoked_token(tmp_path: Path) -> None:
    file, mounted = tmp_path / "tokens.json", tmp_path / "mounted.json"
    secret, made = create_token(file, "a", ("push",), None)
    mounted.touch()
    script = 'mount --bind "$1" "$2" && exec "$3" -c "$4" "$2" "$5" "$6"'
    words = [str(file), str(mounted), sys.executable, MOUNTED, made.id, secret]
    command = ["unshare", "-rm", "sh", "-c", script, "sh", *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        assert "cannot be replaced: it is mounted alone" in running.stdout.readline()
        revoke_token(file, made.id)
        print(file=running.stdin, flush=True)
        assert "it was replaced, and is mounted alone" in running.stdout.readline()
        print(file=running.stdin, flush=True)


@pytest.fixture(scope="module")
def changing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded_service(tmp_path_factory.mktemp("changing")) as running:
        yield running


def status(guarded: Guarded, secret: str) -> int:
    answer = guarded.service.client.get("/v1/models", headers={"Authorization": f"Bearer {secret}"})
    if answer.status_code != 200:
        problem(answer)
    return answer.status_code


def test_a_broken_file_locks_everybody_out_until_it_is_repaired(changing: Guarded) -> None:
    kept = changing.file.read_text()
    changing.file.write_text(kept[:100])
    assert [status(changing, changing.tokens[name]) for name in ("a", "b", "admin")] == [503] * 3
    assert changing.service.client.get("/v1/models").status_code == 401
    assert changing.service.client.get("/health/ready").status_code == 200
    changing.file.unlink()
    assert status(changing, changing.tokens["a"]) == 503
    changing.file.write_text(kept)
    assert status(changing, changing.tokens["a"]) == 200
    log = changing.service.log.read_text()
    assert log.count("all tokens are refused until this is repaired") == 2  # once per fault, not per request
    assert str(changing.file) in log


@pytest.mark.parametrize(
    "content", [None, "", "{}}", '{"tokens": [{"id": "x"}]}'], ids=["missing", "empty", "cut", "other"]
)
def test_serve_does_not_start_with_an_unusable_token_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    monkeypatch.setattr("solrl_http.serving.bind", pytest.fail)
    file = tmp_path / "tokens.json"
    if content is not None:
        file.write_text(content)
    said = refused(main, "serve", "--port", "0", "--token-file", str(file))
    assert str(file) in said
    assert "solrl-rollout token create" in said


@pytest.mark.parametrize(
    ("flags", "state", "said"),
    [
        (["--host", "0.0.0.0"], "missing", "there is no token file"),
        (["--host", "0.0.0.0", "--allow-anonymous"], "warn", "can do anything"),
        (["--token-file", "open.json"], "warn", "other users may write"),
    ],
)
def test_the_doctor_checks_access(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], state: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    create_token(tmp_path / "open.json", "a", ("push",), None)
    (tmp_path / "open.json").chmod(0o666)
    found = typed(main, "doctor", "--port", "0", *flags, COLUMNS="400")
    row = next(line for line in found.stdout.splitlines() if said in line)
    assert state in row
    assert found.returncode == (1 if state == "missing" else 0)
