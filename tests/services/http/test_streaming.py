"""An answer as NDJSON: a start, a line per finished group, and an end line; without it the answer is incomplete."""

import json
from typing import Any, BinaryIO

from pydantic import TypeAdapter
from solrl_proto.rollouts import STREAM_MEDIA_TYPE, EndLine, RolloutAnswer, RolloutGroup, StartLine, StreamLine
from tests.support.service_helpers import RunningService, problem, rollout_request

PROMPTS = ["a red circle", "two blue squares", "a green triangle"]
LINE: TypeAdapter[StreamLine] = TypeAdapter(StreamLine)


def test_the_lines_have_the_content_of_the_document(service: RunningService) -> None:
    request: dict[str, Any] = {"prompts": PROMPTS, "count": 30, "steps": 1, "images": "png"}
    whole = RolloutAnswer.model_validate(service.rollout(**request))
    start, *groups, end = [LINE.validate_python(line) for line in service.lines(**request)]
    assert isinstance(end, EndLine)
    assert end.groups == len(groups) == 3
    made = {line.prompt_id: line for line in groups if isinstance(line, RolloutGroup)}
    assert tuple(made[group.prompt_id] for group in whole.groups) == whole.groups
    assert isinstance(start, StartLine)
    assert dict(start.served).items() <= dict(whole).items()


def test_the_first_group_arrives_before_the_last_is_begun(service: RunningService) -> None:
    request = rollout_request(prompts=[f"{i} red circles" for i in range(40)], count=48, steps=2)
    streaming = service.send(request, accept=STREAM_MEDIA_TYPE)
    with streaming.socket.makefile("rb") as stream:
        while stream.readline().strip():
            pass
        start, first = next_chunk(stream), next_chunk(stream)
        assert (start["kind"], start["served"]["model"]) == ("start", request["model"])
        assert (first["kind"], first["prompt_id"]) == ("group", "p0")
        refused = service.client.post("/v1/rollouts", json=rollout_request(count=3000))
        assert problem(refused)["kind"] == "queue-full"
    streaming.leave()


def next_chunk(stream: BinaryIO) -> Any:
    """The line in the next chunk of a body."""
    line = json.loads(stream.read(int(stream.readline(), 16)))
    stream.readline()
    return line
