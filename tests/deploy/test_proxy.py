"""The proxy of deploy/nginx.conf, a real nginx before a real service, stops what the service itself does not."""

import json
import re
import shutil
import socket
import socketserver
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from solrl_client.connections import http_client
from solrl_proto.rollouts import STREAM_MEDIA_TYPE
from tests.services.security_helpers import Guarded, guarded_service
from tests.support.ports import free_port
from tests.support.service_helpers import QUEUE_LIMIT, read_response, rollout_request

CONFIGURATION = Path(__file__).parents[2] / "deploy/nginx.conf"
PER_ADDRESS = 4
HEAD = "POST /v1/rollouts HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("nginx") and shutil.which("openssl")),
        reason="no nginx or openssl here; scripts/install-test-tools installs them",
    ),
]


class Names(socketserver.UDPServer):
    """A DNS that answers each question with `address`, as Docker's does for `rollout`."""

    address = "127.0.0.1"


class _Question(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        question, sock = self.request
        assert isinstance(self.server, Names)
        head = question[:2] + b"\x81\x80" + question[4:6] + b"\0\1\0\0\0\0"
        answer = b"\xc0\x0c\0\1\0\1\0\0\0\0\0\4" + socket.inet_aton(self.server.address)
        sock.sendto(head + question[12:] + answer, self.client_address)


@dataclass(frozen=True)
class Proxy:
    """A running nginx, its port, certificate, what trusts that, the service behind it, and the DNS that it asks."""

    port: int
    certificate: Path
    trust: ssl.SSLContext
    behind: Guarded
    names: Names

    def connect(self) -> ssl.SSLSocket:
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=600)
        return self.trust.wrap_socket(sock, server_hostname="localhost")

    def client(self) -> httpx.Client:
        return httpx.Client(
            base_url=f"https://localhost:{self.port}", verify=self.trust, timeout=600, headers=self.behind.headers("a")
        )

    def post(self, length: str, token: str = "a") -> bytes:
        secret = self.behind.tokens.get(token, token)
        return f"{HEAD}Authorization: Bearer {secret}\r\n{length}\r\n\r\n".encode()


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """The proxy with short timeouts, few connections and a self-signed certificate."""
    folder, port = tmp_path_factory.mktemp("proxy"), free_port()
    certificate = folder / "tls_certificate"
    command = "openssl req -x509 -nodes -newkey ec -pkeyopt ec_paramgen_curve:P-256 -subj /CN=localhost"
    command += f" -addext subjectAltName=DNS:localhost -keyout {folder}/tls_key -out {certificate}"
    subprocess.run(command.split(), check=True, capture_output=True)
    with guarded_service(folder) as behind, Names(("127.0.0.1", 0), _Question) as names:
        threading.Thread(target=names.serve_forever, daemon=True).start()
        text = CONFIGURATION.read_text()
        for written, instead in (
            ("/tmp/", f"{folder}/"),
            ("127.0.0.11 valid=10s", f"127.0.0.1:{names.server_address[1]} valid=1s"),
            ("rollout:8100", f"rollout:{behind.service.port}"),
            ("listen 8443", f"listen 127.0.0.1:{port}"),
            ("/run/secrets/", f"{folder}/"),
            ("addresses 64", f"addresses {PER_ADDRESS}"),
            ("worker_processes auto", "worker_processes 1"),  # each worker remembers what the DNS answered
        ):
            assert written in text
            text = text.replace(written, instead)
        text = re.sub(r"(client_\w+_timeout) 20s", r"\1 1s", text)
        (folder / "nginx.conf").write_text(text)
        command = f"nginx -e stderr -c {folder}/nginx.conf"
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen([*command.split(), "-g", "daemon off;"], stderr=log)
        try:
            found = Proxy(port, certificate, ssl.create_default_context(cafile=certificate), behind, names)
            while process.poll() is None:
                try:
                    found.connect().close()
                    break
                except ConnectionRefusedError:
                    continue
            assert process.poll() is None, (folder / "log").read_text()
            yield found
        finally:
            process.terminate()
            process.wait()
            names.shutdown()


def test_requests_and_streams_pass_and_a_stranger_is_refused_before_the_body(proxy: Proxy) -> None:
    stream = {"Origin": f"https://localhost:{proxy.port}", "Accept": STREAM_MEDIA_TYPE}
    endless = rollout_request(count=QUEUE_LIMIT, steps=200)
    with proxy.client() as client:
        answer = client.post("/v1/rollouts", json=rollout_request(prompts=["a", "b"], count=2), headers=stream)
        assert [json.loads(line)["kind"] for line in answer.text.splitlines()] == ["start", "group", "group", "end"]
        assert client.get("/metrics", headers=proxy.behind.headers("admin")).status_code == 403
        with client.stream("POST", "/v1/rollouts", json=endless, headers=stream) as answer:
            assert json.loads(next(answer.iter_lines()))["kind"] == "start"
    with proxy.connect() as sock:
        sock.sendall(proxy.post("Content-Length: 100000", token="solrl_guessed"))
        status, _, body = read_response(sock)
    assert (status, json.loads(body)["type"]) == (401, "urn:solrl:problem:unauthenticated")


def test_nginx_follows_the_service_to_a_new_address(proxy: Proxy) -> None:
    with proxy.client() as client:
        for address, status in (("127.0.0.9", httpx.codes.BAD_GATEWAY), ("127.0.0.1", httpx.codes.OK)):
            proxy.names.address = address
            while client.get("/health/live").status_code != status:
                continue


def test_the_log_has_the_address_of_the_client(proxy: Proxy) -> None:
    headers = proxy.behind.headers("a") | {"X-Request-ID": "from-elsewhere"}
    with httpx.Client(transport=httpx.HTTPTransport(verify=proxy.trust, local_address="127.0.0.2")) as client:
        assert client.get(f"https://localhost:{proxy.port}/v1/models", headers=headers).status_code == httpx.codes.OK
    line = None
    while line is None:
        lines = proxy.behind.service.log.read_text().splitlines()
        line = next((line for line in lines if "from-elsewhere" in line), None)
    assert json.loads(line)["client"] == "127.0.0.2"


def test_a_client_trusts_the_authority_that_the_environment_names(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer() -> int:
        with http_client(f"https://localhost:{proxy.port}") as client:
            return client.get("/health/live").status_code

    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        answer()
    monkeypatch.setenv("SSL_CERT_FILE", str(proxy.certificate))
    assert answer() == httpx.codes.OK


@pytest.mark.parametrize("begun", ["", "GET /v1/mod", HEAD + "Content-Length: 100000\r\n\r\n{"])
def test_a_silent_client_is_disconnected(proxy: Proxy, begun: str) -> None:
    begun = begun.replace("\r\n\r\n", f"\r\nAuthorization: Bearer {proxy.behind.tokens['a']}\r\n\r\n")
    with proxy.connect() as sock:
        sock.sendall(begun.encode())
        while sock.recv(4096):
            pass


def test_a_head_that_trickles_is_cut_off(proxy: Proxy) -> None:
    with proxy.connect() as sock:
        sock.settimeout(0.1)
        sock.sendall(b"GET / HTTP/1.1\r\n")
        while True:
            try:
                sock.sendall(b"X: y\r\n")
                if not sock.recv(4096):
                    break
            except TimeoutError:
                continue
            except OSError:
                break


def test_an_address_has_a_limit_of_requests_at_a_time(proxy: Proxy) -> None:
    request = json.dumps(rollout_request(count=4, steps=200)).encode()
    with ExitStack() as stack:
        socks = [stack.enter_context(proxy.connect()) for _ in range(PER_ADDRESS + 1)]
        for sock in socks[:-1]:
            sock.sendall(proxy.post(f"Accept: {STREAM_MEDIA_TYPE}\r\nContent-Length: {len(request)}") + request)
            assert sock.recv(4096).startswith(b"HTTP/1.1 200")
        socks[-1].sendall(proxy.post("Content-Length: 0"))
        assert socks[-1].recv(4096).startswith(b"HTTP/1.1 429")
