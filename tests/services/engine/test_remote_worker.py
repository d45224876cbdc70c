"""Workers in other processes: faults of this machine, of a connection, and at awkward moments."""

import contextlib
import errno
import itertools
import os
import queue
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from solrl_proto.problems import ProblemError
from solrl_rollout.engine.engine import Engine
from solrl_rollout.engine.work import LeasedAdapter, ScoredChunk
from solrl_rollout.engine.workers import process, remote
from solrl_rollout.engine.workers.encoding import HOSTED, Header, encode_scored
from solrl_rollout.engine.workers.local import LocalWorker
from solrl_rollout.engine.workers.process import memory_file
from solrl_rollout.engine.workers.remote import RemoteWorker, SharedAdapters
from solrl_rollout.serve import serve
from solrl_rollout.settings import RolloutSettings
from solrl_rollout.status.rollout_metrics import RolloutMetrics
from tests.services.fake_backend import REWARD, FakeBackend, chunk, fault_of, job, leased, pinged, scored
from tests.services.reward_servers import until

SETTINGS = RolloutSettings(rewards=(REWARD,), device="cpu")
STATE: dict[str, Any] = {"memory": {}}
FINISHED = encode_scored(ScoredChunk({REWARD: torch.ones(4)}, None, 0.0, False, 0.0, 1.0, 0.0))


class Process:
    """A `Connection` to a process that the test plays. It loads, answers pings, and finishes chunks at once.

    It finishes chunks with the prompt `holds` only when it is ended. `on_load` and `on_chunk`, which gets the process
    and the message's `chunk`, are called before such a message arrives; if they raise, it does not.
    """

    def __init__(
        self,
        on_chunk: Callable[["Process", Header], None] = lambda *_: None,
        on_load: Callable[[], None] = lambda: None,
        holds: str = "held",
    ) -> None:
        self.on_chunk, self.on_load, self.holds = on_chunk, on_load, holds
        self.ended = False
        self.held: list[int] = []
        self._arrived: queue.SimpleQueue[tuple[Header, bytes] | None] = queue.SimpleQueue()
        hosted = LocalWorker(SETTINGS, RolloutMetrics(), FakeBackend).load()
        self.hosted = HOSTED.dump_python(hosted, mode="json")

    def publish(self, adapter: LeasedAdapter) -> LeasedAdapter:
        return adapter

    def send(self, header: Header, source: Any = None) -> None:
        match header["do"]:
            case "load":
                self.on_load()
                self.answer({"is": "loaded", "hosted": self.hosted, **STATE})
            case "ping":
                self.answer({"is": "pong"})
            case "chunk":
                self.on_chunk(self, header["chunk"])
                self.answer({"is": "taken"})
                if header["chunk"]["prompt"]["text"] == self.holds:
                    self.held.append(header["id"])
                else:
                    self._finish(header["id"])

    def answer(self, header: Header, body: bytes = b"") -> None:
        self._arrived.put((dict(header), body))

    def receive(self) -> tuple[Header, bytes]:
        arrived = self._arrived.get()
        if arrived is None:
            raise ConnectionError
        return arrived

    def die(self) -> None:
        self._arrived.put(None)

    def kill(self) -> None:
        self.ended = True
        self.die()

    def close(self) -> str:
        self.ended = True
        for id in self.held:
            self._finish(id)
        self.die()
        return "the test ended it"

    def _finish(self, id: int) -> None:
        scored, images = FINISHED
        self.answer({"is": "finished", "id": id, "scored": scored, **STATE}, images)


@contextlib.contextmanager
def engine_on(*processes: Iterable[Process], settings: RolloutSettings = SETTINGS) -> Iterator[Engine]:
    """A running engine; its workers each have some processes, one after another."""
    metrics = RolloutMetrics()
    starts = {f"w{i}": iter(own).__next__ for i, own in enumerate(processes)}
    workers = [RemoteWorker(settings, metrics, FakeBackend, name=name, connect=starts[name]) for name in starts]
    engine = Engine(settings, metrics, workers)
    try:
        engine.start().result(600)
        yield engine
    finally:
        engine.close()


def test_an_engine_ends_although_a_worker_that_answers_pings_finishes_no_chunk() -> None:
    process, held = Process(), chunk(job(), "held")
    with engine_on([process], settings=SETTINGS.model_copy(update={"live_timeout": 0.5})) as engine:
        engine.scheduler.submit([held])
        until(lambda: bool(process.held))
    assert process.ended
    assert held.result.done()
    assert not [thread for thread in threading.enumerate() if thread.name == "solrl-engine-w0"]


def adapted(seed: int) -> Any:
    return job(adapter=leased({"linear": (4, 4)}, seed))


def test_an_adapter_without_room_fails_its_chunk_alone() -> None:
    class Full(Process):
        def publish(self, adapter: LeasedAdapter) -> LeasedAdapter:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with engine_on([Full()]) as engine:
        with pytest.raises(ProblemError) as error:
            scored(engine, chunk(adapted(1)))
        assert error.value.problem.kind == "too-many-bytes"
        assert os.strerror(errno.EMFILE) in error.value.problem.detail
        assert len(scored(engine, chunk(job())).rewards[REWARD]) == 4
        assert [one.restarts for one in engine.workers] == [0]


def test_a_service_may_open_as_many_files_as_its_user() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        with pytest.raises(ProblemError, match="there is no token file"):
            serve(RolloutSettings(host="0.0.0.0"))
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def breaks_down(process: Process, one: Header) -> None:
    """Die of the prompt `fatal`."""
    if one["prompt"]["text"] == "fatal":
        process.die()


@pytest.fixture
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are loaded again without a pause."""
    monkeypatch.setattr("solrl_rollout.engine.engine._LONGEST_PAUSE", 0.0)


def test_chunks_are_spread_over_workers_that_each_merge_a_version_once() -> None:
    both = threading.Barrier(2)
    served: list[list[str]] = [[], []]

    def note(place: int, _: Process, one: Header) -> None:
        served[place].append(one["adapter"])
        if one["prompt"]["text"] == "both":
            both.wait(600)

    with engine_on(*([Process(partial(note, place))] for place in range(2))) as engine:
        for seed in range(3):
            chunks = [chunk(adapted(seed), "both") for _ in range(2)] + [chunk(adapted(seed)) for _ in range(12)]
            engine.scheduler.submit(chunks)
            for sent in chunks:
                assert torch.equal(sent.result.result(600).rewards[REWARD], torch.ones(4))
        assert sum(worker.chunks for worker in engine.workers) == 3 * 14
    for digests in served:
        assert len(list(itertools.groupby(digests))) == 3


@pytest.mark.usefixtures("_hasty")
def test_a_chunk_that_loses_two_workers_fails_alone() -> None:
    with engine_on([Process(breaks_down), Process(breaks_down), Process()]) as engine:
        chunks = [chunk(job(), prompt) for prompt in ("a", "fatal", "b")]
        engine.scheduler.submit(chunks)
        for sent in chunks[::2]:
            assert torch.equal(sent.result.result(600).rewards[REWARD], torch.ones(4))
        assert fault_of(chunks[1]).problem.detail.startswith("2 workers died")
        assert [sent.losses for sent in chunks] == [0, 2, 0]
        assert (engine.workers[0].restarts, engine.scheduler.dead) == (2, False)


@pytest.mark.usefixtures("_hasty")
def test_a_worker_that_keeps_dying_is_given_up_and_the_engine_with_the_last() -> None:
    unused = Process(on_load=lambda: pytest.fail("it loads"))
    with engine_on([*(Process(breaks_down) for _ in range(5)), unused]) as engine:
        chunks = [chunk(job(), "fatal") for _ in range(4)]
        engine.scheduler.submit(chunks)
        kinds = [fault_of(sent).problem.kind for sent in chunks]
        assert kinds == ["generation-failed"] * 2 + ["engine-dead"] * 2
        assert engine.scheduler.dead


def test_a_lost_chunk_that_was_cancelled_is_not_made_again() -> None:
    texts: list[str] = []

    def cancel(process: Process, _: Header) -> None:
        engine.cancel(lost.job)
        process.die()

    lost = chunk(job(), "lost")
    with engine_on([Process(cancel), Process(lambda _, one: texts.append(one["prompt"]["text"]))]) as engine:
        engine.scheduler.submit([lost])
        fault_of(lost)
        assert scored(engine, chunk(job(), "after")).rewards
    assert texts == ["after"]


def test_workers_with_different_models_do_not_start() -> None:
    first, other = Process(), Process()
    for each, transformer in ((first, 7), (other, 8)):
        each.hosted[0]["info"]["digests"] = {"vae": f"sha256:{0:064x}", "transformer": f"sha256:{transformer:064x}"}
    digests = r"transformer: sha256:\w{64} \(w\d: sha256:\w{64}\); all"
    expected = rf"worker w\d and worker w\d loaded mini-sana differently, in {digests}"
    with pytest.raises(RuntimeError, match=expected), engine_on([first], [other]):
        pass


def test_a_message_that_cannot_be_sent_to_a_live_process_ends_it_and_another_makes_the_chunk() -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))

    first, sent = Process(refuse), chunk(job())
    with engine_on([first, Process()]) as engine:
        assert torch.equal(scored(engine, sent).rewards[REWARD], torch.ones(4))
        assert first.ended
        assert sent.losses == 0


def test_a_result_that_arrives_while_its_worker_ends_for_good_counts_once() -> None:
    def break_down(_: Process, one: Header) -> None:
        if one["prompt"]["text"] == "fatal":
            raise RuntimeError("a fault of the front")

    with engine_on([Process(break_down)]) as engine:
        held, fatal = chunk(job(), "held"), chunk(job(), "fatal")
        engine.scheduler.submit([held, fatal])
        assert torch.equal(held.result.result(600).rewards[REWARD], torch.ones(4))
        fault_of(fatal)
        assert engine.workers[0].chunks == 1


def test_chunks_at_reward_servers_make_room_for_others_and_are_made_again_if_their_process_dies() -> None:
    first = Process(holds="asked")
    with engine_on([first, Process()]) as engine:
        chunks = [chunk(job(), "asked") for _ in range(5)]
        engine.scheduler.submit(chunks)
        until(lambda: len(set(first.held)) == 5)
        first.die()
        for sent in chunks:
            assert torch.equal(sent.result.result(600).rewards[REWARD], torch.ones(4))
            assert sent.losses == 1


def test_a_ping_while_a_worker_s_end_is_awaited_is_answered() -> None:
    ending, go_on = threading.Event(), threading.Event()

    class Slow(Process):
        def close(self) -> str:
            ending.set()
            assert go_on.wait(600)
            return super().close()

    first = Slow()
    with engine_on([first, Process()]) as engine:
        try:
            first.die()
            assert ending.wait(600)
            assert engine.workers[0].serving
            pinged(engine)
        finally:
            go_on.set()


def test_a_worker_that_is_closed_while_its_process_starts_does_not_load() -> None:
    starting, go_on = threading.Event(), threading.Event()
    process = Process(on_load=lambda: pytest.fail("it loads"))

    def connect() -> Process:
        starting.set()
        assert go_on.wait(600)
        return process

    worker = RemoteWorker(SETTINGS, RolloutMetrics(), FakeBackend, name="w", connect=connect)
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(worker.load)
        assert starting.wait(600)
        worker.close()
        go_on.set()
        with pytest.raises(RuntimeError, match="worker w ended while it loaded"):
            loading.result(600)
    assert process.ended


@pytest.mark.usefixtures("_hasty")
@pytest.mark.parametrize(("steady", "dead"), [(0.0, False), (600.0, True)])
def test_deaths_after_steady_work_give_no_worker_up(monkeypatch: pytest.MonkeyPatch, steady: float, dead: bool) -> None:
    monkeypatch.setattr("solrl_rollout.engine.engine._STEADY_SECONDS", steady)
    processes = [Process() for _ in range(7)]
    with engine_on(processes) as engine:
        for restarts, process in enumerate(processes[:-1], 1):
            process.die()
            while engine.workers[0].restarts < restarts and not engine.scheduler.dead:
                time.sleep(0.001)
        assert engine.scheduler.dead == engine.workers[0].given_up == dead
        assert engine.workers[0].restarts == (4 if dead else 6)


@pytest.mark.usefixtures("_hasty")
def test_deaths_beside_chunks_of_another_worker_give_no_worker_up() -> None:
    def work_beside() -> None:
        scored(engine, chunk(job()))

    dying = [Process(), *(Process(on_load=work_beside) for _ in range(7))]
    with engine_on(dying, [Process()]) as engine:
        for restarts, process in enumerate(dying[:-1], 1):
            process.die()
            while engine.workers[0].restarts < restarts:
                assert not engine.workers[0].given_up
                time.sleep(0.001)
        assert engine.workers[1].chunks == 7


def test_a_silent_process_is_replaced_and_its_chunks_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(Process):
        def send(self, header: Header, source: Any = None) -> None:
            if header["do"] == "load":
                super().send(header, source)

    patient = Process(on_load=lambda: monkeypatch.setattr(remote, "_SILENT", 100.0))
    monkeypatch.setattr(remote, "_SILENT", 0.01)
    silent = Silent()
    with engine_on([silent, patient]) as engine:
        assert torch.equal(scored(engine, chunk(job())).rewards[REWARD], torch.ones(4))
        assert silent.ended
        assert engine.workers[0].chunks == 1
        pinged(engine)


def test_a_process_that_kills_cannot_end_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "END_SECONDS", 0.01)
    connection = process.ProcessConnection({}, SharedAdapters(memory_file))
    pid = connection.process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(connection.process, "kill", lambda: None)  # as if it were in a driver's call
            connection.kill()
            with pytest.raises(ConnectionError):
                connection.receive()
            assert connection.close() == f"process {pid} does not end when it is killed, as if stuck in a driver"
    finally:
        connection.process.kill()
        connection.process.wait()
