"""Connections that take too long, send too much, or speak no HTTP, on top of uvicorn's own handling of them.

uvicorn waits for ever for the rest of a head or a body. Here whoever sends slower than `RATE` is cut once his time is
over. An answer may wait for longer, for a trainer takes a streamed group when it has made use of the one before; but
whoever takes nothing at all is cut, too.
"""

import asyncio
import logging
import sys
from dataclasses import dataclass
from typing import Any, ClassVar

import h11
from solrl_proto.problems import Problem, ProblemKind
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from solrl_rollout.http.limits import MAX_HEAD_BYTES, head_too_large
from solrl_rollout.http.problems import respond

logger = logging.getLogger(__name__)

RATE = 16 * 1024
"""Bytes a second that a client must reach on average, once its time is over, to be waited for longer."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Seconds for a head, and for a body of any size before `RATE` counts; how many connections."""

    slow: float = 20.0
    connections: int = 512

    @property
    def stalled(self) -> float:
        """Seconds after which a client must have taken something of its answer."""
        return 15 * self.slow


class GuardedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 with time limits; a connection is in one phase at a time, each with its own clock."""

    limits: ClassVar[ConnectionLimits] = ConnectionLimits()

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._phase: tuple[str, Any] | None = None
        self._clock: asyncio.TimerHandle | None = None
        self._received = 0
        self._sending: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock, or refuse one connection too many."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            self._answer(_too_many())
            return
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clocks."""
        for clock in (self._clock, self._sending):
            if clock is not None:
                clock.cancel()
        self._clock = self._sending = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Handle what came and see which phase it led to."""
        self._received += len(data)
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Go on with the next request, or with what is left of this one's body."""
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        """The client does not take its answer as fast as it is made: see that it takes it at all."""
        super().pause_writing()
        size = self.transport.get_write_buffer_size()
        self._sending = self.loop.call_later(self.limits.stalled, self._check_sending, size)

    def resume_writing(self) -> None:
        """It caught up."""
        super().resume_writing()
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    def send_400_response(self, msg: str) -> None:
        """Answer what h11 could not read with a problem document; 431 for a head that is too long."""
        error = sys.exception()
        if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431:
            self._answer(head_too_large(f"more than {MAX_HEAD_BYTES} bytes"))
        else:
            self._answer(_not_http())

    def _watch(self) -> None:
        """Keep the clock of the phase that the connection is in."""
        phase = None if self.transport.is_closing() else self._find_phase()
        if phase == self._phase:
            return
        self._phase = phase
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None
        if phase is not None:
            self._received = 0
            self._clock = self.loop.call_later(self.limits.slow, self._overdue, self.loop.time())

    def _find_phase(self) -> tuple[str, Any] | None:
        state = self.conn.their_state
        if state is h11.IDLE and (self.cycle is None or self.conn.trailing_data[0]):
            return "head", self.cycle
        if state is h11.SEND_BODY:
            return "rest" if self.cycle.response_complete else "body", self.cycle
        return None  # at work, or between two requests, which uvicorn limits

    def _overdue(self, started: float) -> None:
        self._clock = None
        assert self._phase is not None
        name = self._phase[0]
        # A large adapter over a slow line takes its time; a head does not, and neither does what nobody reads.
        allowed = self.limits.slow + (self._received / RATE if name == "body" else 0)
        left = started + allowed - self.loop.time()
        if self.flow.read_paused:  # it is we who do not read
            left = self.limits.slow
        if left > 0:
            self._clock = self.loop.call_later(left, self._overdue, started)
            return
        sent = f"{self._received} bytes of its {name} in {allowed:.1f} s"
        logger.info("cut a client that sent %s", sent, extra=self._who())
        self._answer(_too_slow(sent))

    def _check_sending(self, before: int) -> None:
        now = self.transport.get_write_buffer_size()
        if now >= before:
            logger.info("cut a client that does not take its answer (%d bytes left)", now, extra=self._who())
            self.transport.abort()
        else:
            self._sending = self.loop.call_later(self.limits.stalled, self._check_sending, now)

    def _who(self) -> dict[str, Any]:
        return {"fields": {"client": self.client[0] if self.client else None}}

    def _answer(self, problem: Problem) -> None:
        """Send a problem if an answer can still be begun, and close."""
        if self.transport.is_closing():
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            if self.cycle is not None:
                self.cycle.disconnected = True  # what the application answers comes too late
                self.cycle.message_event.set()
            answer = respond(problem)
            headers = [*answer.raw_headers, (b"connection", b"close")]
            response = h11.Response(status_code=problem.status, headers=headers, reason=STATUS_PHRASES[problem.status])
            for event in (response, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def _too_slow(sent: str) -> Problem:
    return ProblemKind.REQUEST_TIMEOUT.problem(
        "the request did not come in whole in its time",
        got=sent,
        expected=f"a head in the service's slow_client_timeout, a body at {RATE} bytes a second at least",
        action="send the request again over a better line, or raise slow_client_timeout of the service",
    )


def _not_http() -> Problem:
    return ProblemKind.BAD_REQUEST.problem(
        "what came in cannot be read as HTTP/1.1",
        action="speak HTTP to this port; TLS ends at the proxy in front of it",
    )


def _too_many() -> Problem:
    return ProblemKind.TOO_MANY_CONNECTIONS.problem(
        "the service holds as many connections as it may",
        action="try again soon; reuse connections, or raise max_connections of the service",
    )
