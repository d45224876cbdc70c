"""Time limits for connections, on top of uvicorn's protocol.

uvicorn waits forever for the rest of a head or a body. Here a client is cut off whose head takes too long, or whose
body arrives more slowly than `RATE` at any time, regardless of earlier data. An answer may take longer: a trainer
reads a streamed group only after it has processed the previous one; but a client that reads nothing at all is cut off,
too.
"""

import asyncio
import logging
import sys
import time
from dataclasses import dataclass
from typing import Any, ClassVar

import h11
from solrl_proto.problems import Problem, ProblemKind
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from solrl_http.limits.sizes import MAX_HEAD_BYTES, head_too_large
from solrl_http.problems import respond

logger = logging.getLogger(__name__)

RATE = 16 * 1024
"""Bytes of a body that a client must send per second, on average over every `ConnectionLimits.slow` seconds."""
READ_BYTES = 64 * 1024
"""Bytes that are read from a connection at a time."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of connections.

    Attributes:
        slow: seconds for a head, and the window over which a body must average `RATE`.
        connections: number of open connections.
    """

    slow: float = 20.0
    connections: int = 512

    @property
    def stalled(self) -> float:
        """Seconds within which a client must read some of its answer."""
        return 15 * self.slow


class _MeasuredFlow(FlowControl):
    """uvicorn's flow control, which measures how long the service did not read."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._resumed_s = 0.0
        self._paused_at: float | None = None

    @property
    def paused_s(self) -> float:
        """Total seconds in which reading was paused."""
        return self._resumed_s + (time.monotonic() - self._paused_at if self._paused_at is not None else 0.0)

    def pause_reading(self) -> None:
        """Stop reading."""
        if self._paused_at is None:
            self._paused_at = time.monotonic()
        super().pause_reading()

    def resume_reading(self) -> None:
        """Read again."""
        self._resumed_s, self._paused_at = self.paused_s, None
        super().resume_reading()


class GuardedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with time limits. A connection is in one phase at a time; each has its own clock."""

    limits: ClassVar[ConnectionLimits] = ConnectionLimits()

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._phase: tuple[str, Any] | None = None
        self._clock: asyncio.TimerHandle | None = None
        self._received = 0
        self._started = self._unread = 0.0
        self._sending: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock; refuse the connection if there are too many."""
        super().connection_made(transport)
        # asyncio reads up to 256 KiB at a time, of which h11 and uvicorn copy what the application does not read: with
        # hundreds of clients that is more than the budget's margin.
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]
        self.flow = _MeasuredFlow(transport)
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
        """Process received data and update the phase."""
        self._received += len(data)
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Continue with the next request, or with the rest of this one's body."""
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        """Start to check that a client which falls behind still reads its answer."""
        super().pause_writing()
        size = self.transport.get_write_buffer_size()
        self._sending = self.loop.call_later(self.limits.stalled, self._check_sending, size)

    def resume_writing(self) -> None:
        """Stop checking; the client caught up."""
        super().resume_writing()
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP with a problem document; 431 for a head that is too long."""
        error = sys.exception()
        if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431:
            self._answer(head_too_large(f"more than {MAX_HEAD_BYTES} bytes"))
        else:
            self._answer(_not_http())

    def _watch(self) -> None:
        """Restart the clock if the connection has entered another phase."""
        phase = None if self.transport.is_closing() else self._find_phase()
        if phase == self._phase:
            return
        self._phase = phase
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None
        if phase is not None:
            self._begin_window()

    def _begin_window(self) -> None:
        """Reset the counts of bytes and time."""
        self._received, self._started, self._unread = 0, self.loop.time(), self._flow.paused_s
        self._call_overdue(self.limits.slow)

    def _call_overdue(self, after: float) -> None:
        self._clock = self.loop.call_later(after, self._overdue, self.loop.time() + after)

    @property
    def _flow(self) -> "_MeasuredFlow":
        flow = self.flow
        assert isinstance(flow, _MeasuredFlow)
        return flow

    def _find_phase(self) -> tuple[str, Any] | None:
        state = self.conn.their_state
        if state is h11.IDLE and (self.cycle is None or self.conn.trailing_data[0]):
            return "head", self.cycle
        if state is h11.SEND_BODY:
            return "rest" if self.cycle.response_complete else "body", self.cycle
        return None  # processing, or between two requests, which uvicorn limits

    def _overdue(self, due: float) -> None:
        """End the window: begin the next if enough of the body arrived, otherwise disconnect the client."""
        self._clock = None
        assert self._phase is not None
        name, now = self._phase[0], self.loop.time()
        self._started += now - due  # the event loop was late, and may have data that it has not read
        left = self.limits.slow - (now - self._started) + self._flow.paused_s - self._unread
        if left > 1e-3:  # the service itself did not read for some of the time
            self._call_overdue(left)
            return
        # Only a body may take longer than the limit, such as a large adapter over a slow line.
        if name == "body" and self._received >= RATE * self.limits.slow:
            self._begin_window()
            return
        sent = f"{self._received} bytes of its {name} in {self.limits.slow:g} s"
        logger.info("cut off a client that sent %s", sent, extra=self._who())
        self._answer(_too_slow(sent))

    def _check_sending(self, before: int) -> None:
        now = self.transport.get_write_buffer_size()
        if now >= before:
            logger.info("cut off a client that does not read its answer (%d bytes left)", now, extra=self._who())
            self.transport.abort()
        else:
            self._sending = self.loop.call_later(self.limits.stalled, self._check_sending, now)

    def _who(self) -> dict[str, Any]:
        return {"fields": {"client": self.client[0] if self.client else None}}

    def _answer(self, problem: Problem) -> None:
        """Send a problem document unless an answer has started, then close the connection."""
        if self.transport.is_closing():
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            if self.cycle is not None:
                self.cycle.disconnected = True  # the application's answer would be too late
                self.cycle.message_event.set()
            answer = respond(problem)
            headers = [*answer.raw_headers, (b"connection", b"close")]
            response = h11.Response(status_code=problem.status, headers=headers, reason=STATUS_PHRASES[problem.status])
            for event in (response, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def _too_slow(sent: str) -> Problem:
    return ProblemKind.REQUEST_TIMEOUT.problem(
        "the request was not complete in time",
        got=sent,
        expected=f"a head within the service's slow_client_timeout, {RATE} bytes of a body per second throughout",
        action="send the request again over a faster connection, or raise slow_client_timeout of the service",
    )


def _not_http() -> Problem:
    return ProblemKind.BAD_REQUEST.problem(
        "the received data is not valid HTTP/1.1",
        action="use HTTP on this port; TLS is terminated by the proxy in front of it",
    )


def _too_many() -> Problem:
    return ProblemKind.TOO_MANY_CONNECTIONS.problem(
        "the service has reached its limit of connections",
        action="try again later; reuse connections, or raise max_connections of the service",
    )
