"""`solrl-train runs`: the caller's runs at a rollout service."""

import sys

from rich import box
from rich.console import Console
from rich.table import Table
from solrl_client.rollouts import RolloutClient
from solrl_core.suggestions import did_you_mean
from solrl_proto.adapters import RunList
from solrl_proto.problems import ProblemError, ProblemKind


def list_runs(url: str) -> None:
    """Print a table of the caller's runs: newest version, number of versions, model and size; or a ProblemError."""
    with RolloutClient(url) as client:
        run_list = client.runs()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("run", overflow="fold")
    table.add_column("model", overflow="fold")
    for heading in ("newest version", "versions held", "MiB"):
        table.add_column(heading, justify="right")
    for run in run_list.runs:
        models = ", ".join(sorted({info.model for info in run.versions}))
        size = sum(info.size for info in run.versions)
        table.add_row(run.run, models, str(run.head), str(len(run.versions)), _mib(size))
    if run_list.runs:
        Console(markup=False).print(table)
    print(f"{len(run_list.runs)} runs, {_mib(run_list.size)} MiB{_quota(run_list)}", file=sys.stderr)


def delete_run(url: str, name: str) -> None:
    """Delete a run of the caller; a ProblemError if there is none, or the service refuses or is unreachable."""
    with RolloutClient(url) as client:
        adapter_list = client.adapters(name)
        if adapter_list is None:
            names = [run.run for run in client.runs().runs]
            raise ProblemError(
                ProblemKind.RUN_NOT_FOUND,
                f"you have no run {name!r} at the service {client.url}{did_you_mean(name, names)}",
                action="`solrl-train runs list` shows yours",
            )
        client.delete(name)
        print(f"deleted {name} with {len(adapter_list.versions)} versions, the newest {adapter_list.head}")


def _quota(run_list: RunList) -> str:
    return "" if run_list.quota is None else f" of {_mib(run_list.quota)} allowed"


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f}"
