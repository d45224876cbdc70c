"""`solrl-rollout serve`: the rollout service until a signal."""

import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table
from solrl_http import logs
from solrl_http.serving import access_line, serve_app

from solrl_rollout.settings import RolloutSettings

if TYPE_CHECKING:
    from fastapi import FastAPI

    from solrl_rollout.service import Service

logger = logging.getLogger(__name__)


def serve(settings: RolloutSettings) -> None:
    """Serve until a SIGTERM or SIGINT, then finish accepted work.

    Raises:
        ProblemError, ValueError, OSError, RuntimeError: the service cannot start.
        ServiceDiedError: the engine died; a supervisor should restart the process.
    """
    logs.install(settings.log_format)
    _warn_of_password(settings, sys.argv)

    def make_app() -> "FastAPI":
        from solrl_rollout.http.app import create_app

        return create_app(settings)

    serve_app(settings, make_app, lambda app, address: _print_start(settings, app.state.service, address))


def _warn_of_password(settings: RolloutSettings, arguments: Sequence[str]) -> None:
    given = any(one.partition("=")[0] == "--redis-url" for one in arguments)
    if given and settings.redis_url and urlsplit(settings.redis_url).password:
        logger.warning("others can read the password in --redis-url; use --redis-url-file or SOLRL_REDIS_URL instead")


def _print_start(settings: RolloutSettings, service: "Service", address: str) -> None:
    table = Table(title="solrl rollout service", show_header=False, title_justify="left")
    for _ in ("name", "value"):
        table.add_column(overflow="fold")
    for hosted in service.hosted.values():
        model = hosted.info
        table.add_row("model", f"{model.name} ({model.family}, {model.width}×{model.height}) on {hosted.device}")
        for info in model.precisions:
            quantised = f", {info.quantized_share:.1%} of the blocks' linear FLOPs quantised"
            default = " (default)" if info.precision == hosted.default_precision else ""
            if info.rank_fidelity is not None:
                default += f", Spearman to BF16 {info.rank_fidelity.spearman:.2f}"
            table.add_row(
                f"precision {info.precision}",
                info.numerics + (quantised if info.quantized_share else "") + default,
            )
    table.add_row("rewards", ", ".join(settings.rewards))
    if settings.reward_hosts:
        table.add_row("rewards of runs", "at " + ", ".join(settings.reward_hosts))
    table.add_row("adapter store", "Redis" if settings.store_url else "in this process, lost when it exits")
    table.add_row("access", access_line(settings))
    table.add_row("address", address)
    table.add_row("page", f"{address}/")
    table.add_row("documentation", f"{address}/docs")
    Console().print(table)
