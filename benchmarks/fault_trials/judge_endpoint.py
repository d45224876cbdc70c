"""A judge's endpoint with prepared answers, and a reward service that asks it."""

import contextlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from fault_trials.reward_process import RewardService, reward_service

JUDGE = "vlm_judge"
_MODEL = "a-judge"
_MODELS = json.dumps({"data": [{"id": _MODEL}]}).encode()


class Endpoint:
    """Answers every question by `status` and `body`.

    In the body, `{key}` stands for the API key of the request, if `repeats`.
    """

    def __init__(self) -> None:
        self.status, self.body, self.repeats = 200, b"", False
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(200, _MODELS)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                key = self.headers.get("Authorization", "").encode()
                body = endpoint.body.replace(b"{key}", key) if endpoint.repeats else endpoint.body
                self._answer(endpoint.status, body)

            def _answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                with contextlib.suppress(OSError):  # the service reads no further
                    self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)


@contextmanager
def judged_service(**environment: str) -> Iterator[tuple[Endpoint, RewardService]]:
    """An endpoint, and a reward service that asks it once for each image."""
    endpoint = Endpoint()
    threading.Thread(target=endpoint.server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{endpoint.server.server_port}/v1"
    options = {JUDGE: {"endpoint": address, "model": _MODEL, "patience": 0}}
    flags = ("--rewards", JUDGE, "--reward-options", json.dumps(options))
    try:
        with reward_service(*flags, environment=environment) as service:
            yield endpoint, service
    finally:
        endpoint.server.shutdown()
        endpoint.server.server_close()
