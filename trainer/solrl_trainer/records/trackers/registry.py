"""Trackers by name: built-in, by entry point, or `package.module:attribute`."""

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

from solrl_core.registry import Registry

from solrl_trainer.records.trackers.tracker import Tracker


def _wrong(tracker: Any) -> str | None:
    is_tracker = isinstance(tracker, type) and issubclass(tracker, Tracker)
    return None if is_tracker else f"a subclass of {Tracker.__module__}.Tracker"


TRACKERS: Registry[type[Tracker]] = Registry(
    "tracker",
    "solrl.trackers",
    {
        "swanlab": "solrl_trainer.records.trackers.hosted:SwanLab",
        "tensorboard": "solrl_trainer.records.trackers.tensorboard:TensorBoard",
        "trackio": "solrl_trainer.records.trackers.hosted:Trackio",
        "wandb": "solrl_trainer.records.trackers.hosted:Wandb",
    },
    wrong=_wrong,
)


def require_trackers(names: Iterable[str]) -> None:
    """Refuse unknown trackers, and missing packages of trackers, by a ValueError that says how to install one."""
    for name in names:
        package = TRACKERS.find(name).package
        if package is not None and find_spec(package) is None:
            extra = f"pip install 'solrl[{name}]'" if name in TRACKERS.built_in else f"pip install {package}"
            raise ValueError(
                f"tracker {name!r} needs the package {package!r}, which is not installed: {extra}; or run without it "
                "(--set track=[])"
            )
