"""Runs the application under uvicorn: one clear message where it cannot start, a clean end on a signal."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

import uvicorn
from rich.console import Console
from rich.table import Table
from solrl_proto.problems import ProblemError

from solrl_rollout.settings import Settings

if TYPE_CHECKING:
    from solrl_rollout.service import Service


def serve(settings: Settings) -> None:
    """Serve until a SIGTERM or SIGINT, then finish what was accepted.

    Raises:
        ProblemError, ValueError, OSError, RuntimeError: the service cannot start.
    """
    listener = bind(settings.host, settings.port)
    with contextlib.closing(listener):
        asyncio.run(_serve(settings, listener))


class _Server(uvicorn.Server):
    """uvicorn's server, which tells the service when it is to stop and ends with exit code 0."""

    def __init__(self, config: uvicorn.Config, service: "Service") -> None:
        super().__init__(config)
        self._service = service

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own raises the signal again at its end, which would kill us before the engine stops.
        loop = asyncio.get_running_loop()
        handled = (signal.SIGINT, signal.SIGTERM)
        for number in handled:
            loop.add_signal_handler(number, self._stop, number)
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)

    def _stop(self, number: int) -> None:
        self._service.draining = True
        self.handle_exit(number, None)


async def _serve(settings: Settings, listener: socket.socket) -> None:
    # Not at the top, so that a port that is taken is told without waiting for torch.
    from solrl_rollout.app import create_app

    app = create_app(settings)
    # The lifespan is entered here rather than by uvicorn, which would turn a start error into a traceback.
    async with app.router.lifespan_context(app):
        host, port = listener.getsockname()[:2]
        address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        _print_start(settings, app.state.service, address)
        config = uvicorn.Config(app, lifespan="off", log_level="info")
        await _Server(config, app.state.service).serve([listener])


def bind(host: str, port: int) -> socket.socket:
    """Take the port before the model is loaded; nothing is accepted until the server listens."""
    # The protocol is named because asyncio turns Nagle's algorithm off only where it is: 40 ms an answer otherwise.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ProblemError(
            "address-unavailable",
            500,
            "Cannot listen",
            f"{host}:{port}: {error.strerror or error}",
            action="stop what uses the port, or choose another with --port (0 takes a free one)",
        ) from error
    return listener


def _print_start(settings: Settings, service: "Service", address: str) -> None:
    model = service.hosted
    default = service.default_precision
    table = Table(title="solrl rollout service", show_header=False, title_justify="left")
    table.add_row("model", f"{model.name} ({model.family}, {model.width}×{model.height})")
    table.add_row("device", service.device)
    for tier in model.precisions:
        quantised = f", {tier.quantized_share:.1%} of the blocks' linear FLOPs quantised"
        table.add_row(
            f"precision {tier.precision}",
            tier.numerics
            + (quantised if tier.quantized_share else "")
            + (" (default)" if tier.precision == default else ""),
        )
    table.add_row("rewards", ", ".join(model.rewards))
    table.add_row("adapter store", "Redis" if settings.redis_url else "in this process, gone at its end")
    table.add_row("address", address)
    table.add_row("documentation", f"{address}/docs")
    Console().print(table)
