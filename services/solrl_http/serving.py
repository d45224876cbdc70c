"""A service's application under uvicorn: one clear message if it cannot start, a clean stop on a signal."""

import asyncio
import contextlib
import ctypes
import errno
import importlib
import logging
import math
import os
import resource
import signal
import socket
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import uvicorn
from rich.console import Console
from rich.table import Table
from rich.text import Text
from solrl_proto.problems import ProblemError, ProblemKind

from solrl_http.access import MAX_HEAD_BYTES
from solrl_http.limits.origins import is_loopback
from solrl_http.problem_responses import draining
from solrl_http.settings import HttpSettings
from solrl_http.tokens import read_tokens

if TYPE_CHECKING:
    from starlette.types import ASGIApp

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_TICK_S = 0.1


class ServiceState(ABC):
    """A running service. Once `draining`, it refuses new work; if `dead`, restart the process."""

    draining = False

    def require_accepting(self) -> None:
        """Raise 503 `draining` if the service is stopping."""
        if self.draining:
            raise draining()

    @abstractmethod
    def require_capacity(self, tenant: str) -> None:
        """Raise the ProblemError of work that the tenant cannot queue now."""

    @property
    @abstractmethod
    def dead(self) -> bool:
        """Whether only a new process can replace this one."""


def serve_app(settings: HttpSettings, module: str, rows: Callable[[Any, str], Iterable[tuple[str, str]]]) -> None:
    """Serve until a SIGTERM or SIGINT, then finish accepted work.

    Args:
        module: its `create_app` makes the application, whose lifespan sets `app.state.service`. Imported once the port
            is bound, so that a port already in use is reported without waiting for torch.
        rows: names and values to print about the service at its address, before it answers.

    Raises:
        ProblemError, ValueError, OSError, RuntimeError: the service cannot start.
        ServiceDiedError: the service died; a supervisor should restart the process.
    """
    raise_file_limit()
    check_exposure(settings)
    with contextlib.closing(bind(settings.host, settings.port)) as listener:
        asyncio.run(_serve(settings, listener, module, rows))


def end_without(threads: str) -> None:
    """End the process with success if a thread whose name begins with the argument is left.

    The thread is in code that does not return: the interpreter would wait for it, or stop it in native code.
    """
    if any(thread.name.startswith(threads) for thread in threading.enumerate()):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


async def trim_memory(interval: float = 10.0) -> None:
    """Return freed memory to the system every `interval` seconds, until cancelled.

    glibc keeps freed memory below a block in use, so a burst of requests raises the process's memory for good. That
    looks like a leak.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library has no malloc_trim
        trim = ctypes.CDLL(None).malloc_trim
        while True:
            await asyncio.sleep(interval)
            await asyncio.to_thread(trim, 0)


def raise_file_limit() -> None:
    """Raise the limit of open files to this user's maximum: each connection and each worker's adapter needs a file."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):  # macOS refuses a limit of infinity
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def check_exposure(settings: HttpSettings) -> None:
    """Refuse to serve other machines without tokens.

    Raises:
        ProblemError: other machines can reach the address, and there is no token file.
        TokenFileError: the token file cannot be used.
    """
    if settings.token_file is not None:
        if all(token.expired for token in read_tokens(settings.token_file)):
            logger.warning("no token in %s is valid, so all requests that need one are refused", settings.token_file)
        return
    published = settings.published_at is not None and not is_loopback(settings.published_at)
    if is_loopback(settings.host) and not published:
        return
    if settings.allow_anonymous and not published:
        logger.warning(
            "there is no token file: anyone who can reach %s can use, read and replace everything",
            settings.host,
        )
        return
    reached = settings.published_at if published else settings.host
    create = f"solrl-rollout token create --tenant NAME --scopes {settings.token_scopes} --file tokens.json"
    raise ProblemError(
        ProblemKind.NO_TOKENS,
        f"other machines can reach {reached}, and there is no token file to control access",
        where="--published-at" if published else "--host",
        got=reached,
        expected="a token file, or a loopback address",
        action=f"create one with `{create}` and pass it as --token-file tokens.json (SOLRL_TOKEN_FILE); "
        + (
            "or publish the port on 127.0.0.1 (SOLRL_PUBLISH)"
            if published
            else "or listen on 127.0.0.1; or, if nobody else can reach the address, pass --allow-anonymous"
        ),
    )


class ServiceDiedError(RuntimeError):
    """The service died; only a new process can replace it."""


async def _serve(
    settings: HttpSettings, listener: socket.socket, module: str, rows: Callable[[Any, str], Iterable[tuple[str, str]]]
) -> None:
    app = importlib.import_module(module).create_app(settings)
    # Entered here, because uvicorn would turn a start error into a traceback.
    async with app.router.lifespan_context(app):
        host, port = listener.getsockname()[:2]
        address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        table = Table(title=app.title, show_header=False, title_justify="left")
        for _ in ("name", "value"):
            table.add_column(overflow="fold")
        local = is_loopback(settings.host)
        anyone = Text("this machine only, no tokens" if local else "ANYONE, no tokens", "" if local else "red")
        access = ("access", f"with tokens from {settings.token_file}" if settings.token_file else anyone)
        for row in (*rows(app.state.service, address), access, ("documentation", f"{address}/docs")):
            table.add_row(*row)
        Console(markup=False).print(table)
        trimming = asyncio.create_task(trim_memory())
        await run_server(uvicorn.Server(_config(app, settings)), listener, app.state.service, settings.drain_timeout)
        trimming.cancel()
        if app.state.service.dead:
            raise ServiceDiedError("the working thread died; the log above has the reason. Start the service again.")


async def run_server(server: uvicorn.Server, listener: socket.socket, service: ServiceState, grace: float) -> None:
    """Serve until a signal, then answer until accepted work is finished, for at most `grace` seconds; or until death.

    uvicorn itself would stop listening at the signal, so new clients would get no answer instead of the reason.
    """
    loop, deadline = asyncio.get_running_loop(), math.inf

    def stop() -> None:
        """Refuse new work; on a second signal, stop immediately."""
        nonlocal deadline
        server.force_exit = service.draining
        deadline = loop.time() + (0 if server.force_exit else grace)
        service.draining = True

    serving = asyncio.create_task(server.serve([listener]))
    await asyncio.sleep(0)  # by now it has installed its signal handlers, which end the process
    for number in _SIGNALS:
        loop.add_signal_handler(number, stop)
    try:
        while not serving.done():
            await asyncio.wait([serving], timeout=_TICK_S)
            remaining = max(0.0, deadline - loop.time())
            drained = service.draining and (not server.server_state.tasks or not remaining)
            if (drained or service.dead) and not server.should_exit:
                # For clients that are still reading their answers by then.
                server.config.timeout_graceful_shutdown = math.ceil(min(remaining, grace))
                server.should_exit = True
        await serving
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


def _config(app: "ASGIApp", settings: HttpSettings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        headers=[("X-Content-Type-Options", "nosniff")],  # of every answer
        limit_concurrency=settings.max_connections + 1,  # uvicorn refuses the one that reaches its limit
        timeout_keep_alive=settings.keep_alive_timeout,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
    )


def bind(host: str, port: int) -> socket.socket:
    """Bind the port before the model is loaded; connections are accepted once the server listens.

    Raises:
        ProblemError: the address cannot be bound; the message names the host or the port as the fault.
    """
    # With an explicit protocol, because asyncio disables Nagle's algorithm only then; it would add 40 ms per answer.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, ValueError, TypeError) as error:  # the latter two, of a name that cannot be encoded
        listener.close()
        fault: dict[str, Any] = {
            "where": "--host",
            "got": host,
            "expected": "a name or address of this machine",
            "action": "give --host 127.0.0.1 for this machine alone, 0.0.0.0 or :: for all of its addresses",
        }
        if getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES):
            fault = {
                "where": "--port",
                "got": port,
                "expected": "a free port, which this user may open",
                "action": "stop the process that uses it, or choose another with --port (0 picks a free one)",
            }
        text = getattr(error, "strerror", None) or error
        raise ProblemError(ProblemKind.ADDRESS_UNAVAILABLE, f"{host}:{port}: {text}", **fault) from error
    return listener
