"""Workers as actors of a Ray cluster, one for each GPU. Ray places them on its nodes."""

import logging
import os
import queue
from functools import partial
from typing import Any

import torch
from solrl_core.adapter import view_adapter

from solrl_rollout.engine.backends import BackendLoader
from solrl_rollout.engine.work import LeasedAdapter
from solrl_rollout.engine.workers.child import Child
from solrl_rollout.engine.workers.encoding import Header, decode_message, encode_message
from solrl_rollout.engine.workers.remote import RemoteWorker, SharedAdapters
from solrl_rollout.engine.workers.worker import Worker
from solrl_rollout.settings import RolloutSettings
from solrl_rollout.status.rollout_metrics import RolloutMetrics

try:
    import ray
    from ray.exceptions import GetTimeoutError, RayError
except ModuleNotFoundError as error:
    if error.name != "ray":
        raise
    raise RuntimeError("--workers ray needs the package ray: pip install '.[ray]', here and on every node") from error

logger = logging.getLogger(__name__)

_PLACE_SECONDS = 30.0
"""Seconds until the log warns that an actor still has no place."""


def ray_workers(settings: RolloutSettings, metrics: RolloutMetrics, load_backend: BackendLoader) -> list[Worker]:
    """The workers of the settings in a Ray cluster, which this process joins. For errors, see `make_workers`."""
    cluster = RayCluster(settings)
    there = settings.model_copy(update={"device": cluster.device})
    return [
        RemoteWorker(there, metrics, load_backend, name=name, connect=partial(RayConnection, cluster, name))
        for name in (f"ray:{i}" for i in range(cluster.workers))
    ]


class RayCluster:
    """The cluster that this machine is a node of, or that RAY_ADDRESS names.

    Attributes:
        nodes: number of its nodes.
        device: device of each worker, "cuda" or "cpu".
        workers: number of workers.
        adapters: adapters in its object store.
    """

    def __init__(self, settings: RolloutSettings) -> None:
        """Join the cluster and check that it has a place for each worker.

        Raises:
            RuntimeError: there is no cluster, or it lacks what the settings name.
        """
        _join(settings)
        resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        nodes = [(int(node.get("CPU", 0)), int(node.get("GPU", 0))) for node in resources]
        gpus = sum(count for _, count in nodes)
        threads = int(os.environ.get("OMP_NUM_THREADS", "0"))
        self.nodes = len(nodes)
        self.device = settings.device if settings.device != "auto" else "cuda" if gpus else "cpu"
        if self.device == "cpu":
            self._threads = threads or 1
            places, place = sum(cpus // self._threads for cpus, _ in nodes), f"{self._threads} CPUs each"
            needs = {"num_cpus": self._threads}
        else:
            self._threads = threads or max(1, min((cpus // count for cpus, count in nodes if count), default=1))
            places, place = gpus, "a GPU each"
            needs = {"num_cpus": 0, "num_gpus": 1}
        self.workers = settings.worker_number or (gpus if self.device == "cuda" else 0)
        if not self.workers:
            raise RuntimeError(
                f"got --workers ray, and the {self.nodes} nodes of the Ray cluster have no GPU; expected ray:N for N "
                "workers on CPUs, or nodes with GPUs, as `ray status` shows them"
            )
        if self.workers > places:
            raise RuntimeError(
                f"got --workers {settings.workers} on {self.device}, and the {self.nodes} nodes of the Ray cluster "
                f"have place for {places} workers, with {place}; expected no more; `ray status` shows the nodes"
            )
        # Ray brings each to each node once, and frees it with its reference.
        self.adapters = SharedAdapters[Any](ray.put)
        # Ray restarts no actor: the engine starts another, as it starts another process, and Ray places it anywhere.
        # With one thread in each concurrency group, calls run in the order that they were sent in.
        self._actor = ray.remote(**needs, concurrency_groups={"handle": 1, "receive": 1}, scheduling_strategy="SPREAD")(
            WorkerActor
        )

    @property
    def joined(self) -> bool:
        """Whether this machine is still a node of it."""
        node_id = ray.get_runtime_context().get_node_id()
        return any(node["Alive"] for node in ray.nodes() if node["NodeID"] == node_id)

    def start(self, name: str) -> Any:
        """Start a worker's actor, which waits for a place."""
        return self._actor.remote(name, self._threads)


class WorkerActor:
    """A worker in a process that Ray places and starts; answers the front's messages.

    Its methods take and return bytes, which Ray does not pickle. Errors end the process, so none is pickled either.
    `handle` and `receive` run in two concurrency groups of one thread each.
    Generation runs in a thread of the worker, so that neither call waits for it: a cancelled chunk stops at its next
    step, whereas `ray.cancel` would wait for a method that generates.
    """

    def __init__(self, name: str, threads: int) -> None:
        """`name`: that of the worker in logs; `threads`: of torch."""
        torch.set_num_threads(threads)
        self._name = name
        self._outbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._child = Child(self._send, lambda source: view_adapter(ray.get(source)))

    def __repr__(self) -> str:
        """Its name in Ray's logs and pages."""
        return self._name

    def place(self) -> tuple[str, int]:
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def handle(self, message: bytes, source: list[Any]) -> None:
        try:
            header, _ = decode_message(message)
            self._child.handle(header, *source)
        except BaseException:
            logger.exception("the worker ends")
            os._exit(1)

    def receive(self) -> bytes:
        return self._outbox.get()

    def _send(self, header: Header, body: bytes = b"") -> None:
        self._outbox.put(encode_message(header, body))


class RayConnection:
    """A `Connection` to a new actor, which ends with this process."""

    def __init__(self, cluster: RayCluster, name: str) -> None:
        """Start the actor."""
        self._cluster = cluster
        self._name = name
        self._actor = cluster.start(name)
        self._handle = self._actor.handle.options(concurrency_group="handle")
        self._next = self._actor.receive.options(concurrency_group="receive")
        self._how = "the service ended it"
        self._placed = False

    def publish(self, adapter: LeasedAdapter) -> Any:
        try:
            return self._cluster.adapters.source(adapter)
        except RayError as error:  # e.g. its object store and disk are full
            raise OSError(" ".join(str(error).split())) from error

    def send(self, header: Header, source: Any = None) -> None:
        """Send a message; with an adapter, the reference to its file."""
        # In a list: a plain argument would make Ray fetch the file before it delivers this message and later messages.
        try:
            self._handle.remote(encode_message(header), [] if source is None else [source])
        except RayError as error:
            raise self._ended(str(error)) from error

    def receive(self) -> tuple[Header, bytes]:
        try:
            if not self._placed:
                self._wait_for_place()
            return decode_message(ray.get(self._next.remote()))
        except RayError as error:
            raise self._ended(str(error)) from error

    def _wait_for_place(self) -> None:
        placed = self._actor.place.remote()
        while not self._placed:
            try:
                node, process = ray.get(placed, timeout=_PLACE_SECONDS)
                self._placed = True
            except GetTimeoutError as error:
                if not self._cluster.joined:
                    raise self._ended("this machine is no node of the Ray cluster any more") from error
                logger.warning("worker %s waits for Ray to place it; `ray status` shows what is free", self._name)
        addresses = {entry["NodeID"]: entry["NodeManagerAddress"] for entry in ray.nodes()}
        logger.info("worker %s is process %d on node %s (%s)", self._name, process, addresses.get(node), node)

    def kill(self) -> None:
        ray.kill(self._actor)

    def close(self) -> str:
        self.kill()
        return self._how

    def _ended(self, how: str) -> ConnectionError:
        self._how = " ".join(how.split())
        return ConnectionError("the actor has ended")


def _join(settings: RolloutSettings) -> None:
    if ray.is_initialized():
        return
    try:
        ray.init(address="auto", log_to_driver=False, configure_logging=False)
    except (ConnectionError, RayError, RuntimeError, ValueError) as error:
        raise RuntimeError(
            f"got --workers {settings.workers}, and there is no Ray cluster to join: {error}; expected one with "
            "this machine as a node: `ray start --head` here, or `ray start --address HEAD:6379`"
        ) from error
