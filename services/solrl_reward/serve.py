"""`solrl-reward serve`: the reward service until a signal."""

import logging
import os
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from solrl_http import logs
from solrl_http.serving import access_line, serve_app

from solrl_reward.scoring_thread import still_scoring
from solrl_reward.settings import RewardSettings

if TYPE_CHECKING:
    from fastapi import FastAPI

    from solrl_reward.service import RewardService


def serve(settings: RewardSettings) -> None:
    """Serve until a SIGTERM or SIGINT, then finish accepted work.

    Raises:
        ProblemError, ValueError, OSError, RuntimeError: the service cannot start.
        ServiceDiedError: the service died; a supervisor should restart the process.
    """
    logs.install(settings.log_format)

    def make_app() -> "FastAPI":
        from solrl_reward.app import create_app

        return create_app(settings)

    serve_app(settings, make_app, lambda app, address: _print_start(settings, app.state.service, address))
    if still_scoring():
        _end_at_once()


def _end_at_once() -> None:
    """End the process although a reward does not return: the interpreter would wait, or stop it in native code."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _print_start(settings: RewardSettings, service: "RewardService", address: str) -> None:
    table = Table(title="solrl reward service", show_header=False, title_justify="left")
    for _ in ("name", "value"):
        table.add_column(overflow="fold")
    for name, digest in service.digests.items():
        table.add_row(f"reward {name}", f"{digest} on {settings.torch_device}")
    table.add_row("access", access_line(settings))
    table.add_row("address", address)
    table.add_row("documentation", f"{address}/docs")
    Console().print(table)
