"""Liveness of the ranks: barriers without a time limit, and a shutdown of all ranks when one fails or dies."""

import json
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from queue import SimpleQueue
from typing import Any, Literal

from solrl_proto.printable import printable

from solrl_trainer.ranks.connections import Connections, send
from solrl_trainer.ranks.rank_info import RankInfo
from solrl_trainer.ranks.shutdown import Shutdown, ShutdownError

_GRACE = 10.0
"""Seconds in which a rank must exit after a shutdown; it may be stuck in a collective that never ends."""
_PROBE_TIMEOUT = 27.0
"""Seconds in which a dead rank's connection is closed; the kernel closes that of a lost node after 25 s."""
_CONFIRMATION_TIMEOUT = 5.0


class Liveness:
    """Control messages between the ranks, over their connections to rank 0.

    Each rank has a listener thread per connection, which answers while the main thread computes. Rank 0 counts the
    arrivals at a barrier, and decides why the ranks shut down. A dead rank makes collectives fail on the others. So
    before rank 0 accepts another rank's error as the reason, it probes all ranks; a dead rank becomes the reason.

    Attributes:
        shutdown: reason why all ranks shut down; None while the run continues.
        hint: text that is appended to the message about a shutdown.
    """

    def __init__(self, rank_info: RankInfo, connections: Connections) -> None:
        """Take over the connections. A shutdown raises `ShutdownError` in the calling thread, the main thread."""
        self.shutdown: Shutdown | None = None
        self.hint = ""
        self._rank_info = rank_info
        self._connections = connections
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._arrivals: Counter[int] = Counter()
        self._barriers = self._passed = 0
        self._finished = self._deciding = self._decided = self._exiting = self._reported = False
        self._alive: set[int] = set()
        self._informed: set[int] = set()
        self._notices: SimpleQueue[str] = SimpleQueue()
        self._terminations: SimpleQueue[None] = SimpleQueue()
        self._main = threading.get_ident()

    def start(self) -> None:
        """Start to listen. The handler of SIGTERM must be in place."""
        for rank in self._connections:
            _start_thread(self._listen, rank, name=f"solrl-rank-{rank}")
        _start_thread(self._shut_down_on_sigterm, name="solrl-sigterm")

    def barrier(self, *, last: bool = False) -> None:
        """Wait until every rank has reached this barrier, without a time limit; after the `last` one ranks may exit.

        Raises:
            ShutdownError: all ranks shut down.
        """
        self._barriers += 1
        self._send({"barrier": self._barriers, "last": last})
        with self._changed:
            self._changed.wait_for(lambda: self._passed >= self._barriers or self.shutdown is not None)
            if self._passed < self._barriers:
                self._exiting = True
                raise ShutdownError

    def notify(self, text: str) -> None:
        """Send a text to rank 0, without waiting; see `on_notice`."""
        self._send({"notice": text})

    def on_notice(self, handle: Callable[[str], object]) -> None:
        """On rank 0: call `handle` with the text of each notice, in another thread. Its error shuts all ranks down."""

        def serve() -> None:
            try:
                while True:
                    handle(self._notices.get())
            except Exception as error:
                self._decide(Shutdown(self._rank_info.rank, "failed", str(error)))

        _start_thread(serve, name="solrl-notices")

    def handle_sigterm(self, *_: object) -> None:
        """Handle SIGTERM, which torchrun sends to end a rank, and `Liveness` to its own main thread.

        Raises:
            ShutdownError: unless the process is already exiting.
        """
        if not self._exiting:
            self._exiting = True
            if self.shutdown is None:
                self._terminations.put(None)
            raise ShutdownError

    def shut_down(self, kind: Literal["failed", "interrupted", "terminated"], text: str = "") -> Shutdown:
        """Shut down all ranks because of this one; returns the reason that rank 0 decided on."""
        self._exiting = True
        own = Shutdown(self._rank_info.rank, kind, text)
        if self.shutdown is None:
            self._send({"failure": asdict(own)})
        with self._changed:
            self._changed.wait_for(lambda: self.shutdown is not None, _PROBE_TIMEOUT + _CONFIRMATION_TIMEOUT)
        return self.shutdown or own

    def exit(self, shutdown: Shutdown) -> None:
        """Print the reason, on one rank per node, and exit immediately.

        Clean-up would wait for collectives that may never end. Rank 0 exits last: its exit closes the connections.
        """
        with self._changed:
            prints = self._rank_info.prints_for_node(shutdown.rank if shutdown.kind == "died" else None)
            prints, self._reported = prints and not self._reported, True
        if prints:
            text = "\n".join(map(printable, str(shutdown).splitlines()))
            print(f"solrl-train: {text}{self.hint and '; ' + self.hint}", file=sys.stderr, flush=True)
        if self._rank_info.is_rank_zero:
            with self._changed:
                self._changed.wait_for(lambda: self._informed >= self._connections.keys(), _CONFIRMATION_TIMEOUT)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(shutdown.exit_code)

    def _send(self, message: Mapping[str, Any]) -> None:
        """Send a message to rank 0; rank 0 handles it itself."""
        if self._rank_info.is_rank_zero:
            self._handle(self._rank_info.rank, message)
            return
        try:
            with self._sending:
                send(self._connections[0], dict(message))
        except OSError:
            self._begin_shutdown(Shutdown(0, "died"))

    def _broadcast(self, message: dict[str, Any]) -> None:
        """Send a message of rank 0 to all other ranks."""
        if self._rank_info.is_rank_zero:
            with self._sending:
                for connection in self._connections.values():
                    try:
                        send(connection, message)
                    except OSError:  # the listener reports it
                        continue

    def _shut_down_on_sigterm(self) -> None:
        """Shut down in this thread too: Python ignores errors that are raised in destructors and weakref callbacks."""
        self._terminations.get()
        self.shut_down("terminated")

    def _listen(self, rank: int) -> None:
        try:
            with self._connections[rank].makefile("rb") as lines:
                for line in lines:
                    self._handle(rank, json.loads(line))
        except (OSError, ValueError):
            pass
        self._add(self._informed, rank)
        self._begin_shutdown(Shutdown(rank, "died"))

    def _handle(self, sender: int, message: Mapping[str, Any]) -> None:
        match message:
            case {"barrier": number, "last": last}:
                self._arrive(number, last=last)
            case {"passed": number, "last": last}:
                self._pass(number, last=last)
            case {"notice": text}:
                self._notices.put(text)
            case {"failure": failure}:
                self._decide(Shutdown(**failure))
            case {"probe": _}:
                self._send({"alive": True})
            case {"alive": _}:
                self._add(self._alive, sender)
            case {"shutdown": shutdown}:
                self._send({"informed": True})
                self._begin_shutdown(Shutdown(**shutdown))
            case {"informed": _}:
                self._add(self._informed, sender)

    def _add(self, ranks: set[int], rank: int) -> None:
        with self._changed:
            ranks.add(rank)
            self._changed.notify_all()

    def _arrive(self, number: int, *, last: bool) -> None:
        """On rank 0: count an arrival at a barrier; the last arrival lets all ranks pass."""
        with self._changed:
            self._arrivals[number] += 1
            if self._arrivals[number] < self._rank_info.size:
                return
            del self._arrivals[number]
        self._pass(number, last=last)

    def _pass(self, number: int, *, last: bool) -> None:
        self._finished = self._finished or last
        self._broadcast({"passed": number, "last": last})
        with self._changed:
            self._passed = number
            self._changed.notify_all()

    def _decide(self, failure: Shutdown) -> None:
        """On rank 0: shut down because of a rank's failure, or of a rank that died."""
        with self._changed:
            if self._deciding or self._finished:
                return
            self._deciding = True
        _start_thread(self._probe, failure, name="solrl-probe")

    def _probe(self, failure: Shutdown) -> None:
        """Wait until every rank has answered, or one is found dead, whose listener begins the shutdown first."""
        self._broadcast({"probe": True})
        with self._changed:
            ranks = self._connections.keys()
            self._changed.wait_for(lambda: self._decided or self._alive >= ranks, _PROBE_TIMEOUT)
        self._begin_shutdown(failure)

    def _begin_shutdown(self, shutdown: Shutdown) -> None:
        with self._changed:
            if self._decided or self._finished:
                return
            self._decided = True
            self._changed.notify_all()
        # Before this process learns the reason and perhaps exits.
        self._broadcast({"shutdown": asdict(shutdown)})
        with self._changed:
            self.shutdown = shutdown
            self._changed.notify_all()
        if not self._exiting:
            signal.pthread_kill(self._main, signal.SIGTERM)
        timer = threading.Timer(_GRACE, self.exit, args=(shutdown,))
        timer.daemon = True
        timer.start()


def _start_thread(target: Callable[..., None], *arguments: object, name: str) -> None:
    threading.Thread(target=target, args=arguments, name=name, daemon=True).start()
