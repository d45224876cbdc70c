"""A backend in a child process: messages are a JSON header and safetensors bytes over a pair of sockets.

As a program: `child_backend.py serve …` is `solrl-rollout serve …` on this backend; `child_backend.py FD` is the child,
which answers on that file descriptor.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from safetensors.torch import load, save
from solrl_core.adapter import decode_adapter, encode_adapter
from solrl_core.sampling.device_events import DeviceEvent, HostEvent
from solrl_core.sampling.generator import GeneratorOutput
from solrl_engine.backend import (
    AdapterMergeError,
    Backend,
    Capabilities,
    GenerationRequest,
    Identity,
    LayerPrecisionError,
    VersionedAdapter,
)
from solrl_proto import Plan
from solrl_proto.identifiers import Precision
from solrl_proto.models import PrecisionInfo
from solrl_proto.rollouts import AdapterUse
from solrl_rollout.engine.backends import load_backend
from solrl_rollout.engine.workers.encoding import pack_trajectory, unpack_trajectory
from solrl_rollout.engine.workers.messages import Messages, ReceivedMessage
from solrl_rollout.settings import ModelSpec, Settings

ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (AdapterMergeError, LayerPrecisionError, torch.OutOfMemoryError, ValueError)
}


class ChildBackend:
    """The parent's side."""

    def __init__(self, spec: ModelSpec, settings: Settings) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self._socket, self._messages = ours, Messages(ours)
        chosen = settings.model_dump(mode="json", include={"device", "precision"})
        found, _ = self._call({"do": "load", "spec": list(spec), "settings": chosen})
        identity, capabilities = found["identity"], found["capabilities"]
        self.identity = Identity(
            **identity
            | {"latent_shape": tuple(identity["latent_shape"])}
            | {"adapter_layout": {name: (outs, ins) for name, (outs, ins) in identity["adapter_layout"].items()}}
        )
        precisions = tuple(PrecisionInfo.model_validate(one) for one in capabilities["precisions"])
        self.capabilities = Capabilities(**capabilities | {"precisions": precisions, "overlaps": True})

    def batch_sizes(self, limit: int) -> Sequence[int]:
        return (limit,)

    def set_adapter(self, precision: Precision, adapter: VersionedAdapter | None, use: AdapterUse = "merged") -> None:
        body = encode_adapter(adapter.adapter) if adapter else b""
        digest = adapter and adapter.digest
        self._call({"do": "set_adapter", "precision": precision, "digest": digest, "use": use}, body)

    def truncated_tokens(self, prompt: str) -> int:
        return 0

    def generate(
        self, request: GenerationRequest, batch_size: int, between: Callable[[], None] | None = None
    ) -> GeneratorOutput:
        start, tensors = pack_trajectory(request.start)
        asked = {
            "prompts": list(request.prompts),
            "seeds": list(request.seeds),
            "precision": request.precision,
            "plan": request.plan.model_dump(mode="json"),
            "until": request.until,
        }
        message = {"do": "generate", "request": asked, "batch_size": batch_size, "start": start}
        self._messages.send(message, save(tensors) if tensors else b"")
        stopped: BaseException | None = None
        while (answer := self._messages.receive()).header.get("step"):
            try:
                if (
                    stopped is None and between is not None
                ):  # other threads of the child may have reached their next step, too
                    between()
            except BaseException as error:
                stopped = error
            self._messages.send({"stop": stopped is not None})
        if stopped is not None:
            raise stopped
        header, body = self._checked(answer)
        made = load(body)
        images, end = made.pop("images"), unpack_trajectory(header["trajectory"], made, request.plan)
        assert end is not None
        return GeneratorOutput(end, images)

    def record_event(self) -> DeviceEvent:
        return HostEvent()

    def check(self) -> None:
        self._call({"do": "check"})

    def close(self) -> None:
        self._socket.close()
        self._process.wait(600)

    def _call(self, header: dict[str, Any], body: bytes = b"") -> tuple[dict[str, Any], bytes]:
        self._messages.send(header, body)
        return self._checked(self._messages.receive())

    def _checked(self, message: ReceivedMessage) -> tuple[dict[str, Any], bytes]:
        header, body, _ = message
        if "error" in header:
            raise ERRORS.get(header["error"], RuntimeError)(header["message"])
        return header, body


class Stopped(Exception):  # noqa: N818
    """The parent has cancelled the request."""


class Child:
    """The child's side, which generates with a local backend."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        self._backend: Backend | None = None

    def run(self) -> None:
        """Answer requests until the parent closes the socket."""
        while True:
            try:
                header, body, _ = self._messages.receive()
            except ConnectionError:
                return
            try:
                answer = getattr(self, f"_{header.pop('do')}")(body=body, **header)
            except Exception as error:
                answer = {"error": type(error).__name__, "message": str(error)}, b""
            self._messages.send(*answer)

    def _load(self, spec: list[Any], settings: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        self._backend = load_backend(ModelSpec(*spec), Settings(**settings))
        capabilities = asdict(self._backend.capabilities)
        capabilities["precisions"] = [one.model_dump() for one in self._backend.capabilities.precisions]
        return {"identity": asdict(self._backend.identity), "capabilities": capabilities}, b""

    def _check(self, body: bytes) -> tuple[dict[str, Any], bytes]:
        assert self._backend is not None
        self._backend.check()
        return {}, b""

    def _set_adapter(
        self, precision: Precision, digest: str | None, use: AdapterUse, body: bytes
    ) -> tuple[dict[str, Any], bytes]:
        assert self._backend is not None
        layout = dict(self._backend.identity.adapter_layout)
        adapter = None if digest is None else VersionedAdapter(digest, decode_adapter(body, layout))
        self._backend.set_adapter(precision, adapter, use)
        return {}, b""

    def _generate(
        self, request: dict[str, Any], batch_size: int, start: dict[str, Any] | None, body: bytes
    ) -> tuple[dict[str, Any], bytes]:
        assert self._backend is not None
        plan = Plan.model_validate(request.pop("plan"))
        begin = unpack_trajectory(start, load(body) if body else {}, plan)
        made = self._backend.generate(GenerationRequest(plan=plan, start=begin, **request), batch_size, self._between)
        place, tensors = pack_trajectory(made.trajectory)
        return {"trajectory": place}, save({"images": made.images.contiguous(), **tensors})

    def _between(self) -> None:
        self._messages.send({"step": True})
        if self._messages.receive().header["stop"]:
            raise Stopped


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        import tyro
        from solrl_rollout.serve import serve

        serve(tyro.cli(Settings, args=sys.argv[2:]), load_backend=ChildBackend)
    else:
        Child(Messages(socket.socket(fileno=int(sys.argv[1])))).run()
        os._exit(0)
