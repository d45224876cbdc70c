"""Metadata and requests of many lists and objects: both services refuse them before they parse them."""

import json
from collections.abc import Callable

import httpx
import torch
from safetensors.torch import save
from solrl_proto.json_size import MAX_PARSED_BYTES, parsed_bytes

from fault_trials.adapters import rollout_body
from fault_trials.findings import Findings, Row, Tell
from fault_trials.processes import RolloutService, rollout_service
from fault_trials.reward_process import cost, reward_service, scoring

_REWARD = "clipscore"
_ITEMS = ("[]", "{}", '["a"]', "0", '{"a":[{}]}')
"""What a list in the metadata is filled with."""

Ask = Callable[[bytes], httpx.Response]


def run(trials: int, tell: Tell, findings: Findings) -> None:
    """Send `trials` requests, half of them to each service, of 15 MB or of a size that is just parsed."""
    with (
        rollout_service() as rollouts,
        reward_service("--rewards", _REWARD, "--options-from", "mini-sana") as rewards,
    ):
        rewards.ask(scoring(_REWARD)).raise_for_status()
        rollouts.http.post("/v1/rollouts", json=rollout_body(count=1)).raise_for_status()
        for trial in range(trials):
            item, reward, parsed = _ITEMS[trial // 4 % len(_ITEMS)], trial % 2 == 1, trial % 4 >= 2
            size = _parsed_size(item) if parsed else 15_000_000
            filled = f'{{"a":[{",".join([item] * (size // (len(item) + 1)))}]}}'
            what = f"{len(filled):,} bytes of {item} to the {'reward' if reward else 'rollout'} service"
            if reward:
                body, pid, url = _scores(filled), rewards.program.pid, rewards.url
                answer, spent = cost(pid, url, lambda body=body: rewards.ask(body))
            else:
                body, pid, url = _rollout(filled), rollouts.pid, rollouts.url
                answer, spent = cost(pid, url, lambda body=body: _roll_out(rollouts, body))
            findings.require(answer.status_code in (413, 422), what, f"answered {answer.status_code}")
            spent.judge(what, findings)
            findings.trials += 1
            findings.add("refused after it was parsed" if "metadata has" in answer.text else "refused before")
            tell(what)


def _parsed_size(item: str) -> int:
    """Bytes of a list of such items that is parsed: the largest of which the estimate is below the limit."""
    each = parsed_bytes(f"{item},".encode())
    return min(15_000_000, MAX_PARSED_BYTES * 99 // 100 // each * (len(item) + 1))


def _rollout(metadata: str) -> bytes:
    body = json.dumps(rollout_body(count=1))
    field = '"prompts": [{'
    assert field in body
    return body.replace(field, f'{field}"metadata": {metadata}, ').encode()


def _roll_out(service: RolloutService, body: bytes) -> httpx.Response:
    return service.http.post("/v1/rollouts", content=body, headers={"Content-Type": "application/json"})


def _scores(metadata: str) -> bytes:
    request = f'{{"rewards":["{_REWARD}"],"prompts":[{{"text":"a","metadata":{metadata}}}]}}'
    images = {"images": torch.zeros(1, 3, 32, 32, dtype=torch.uint8)}
    return bytes(save(images, metadata={"request": request}))


ROW = Row(
    "nested-json",
    "15 MB of lists, objects or numbers as a prompt's metadata, and as much as is still parsed: both services refuse "
    "them; at most 300 MB more than idle, and they say within 1 s that they are live",
    full=20,
    short=4,
    run=run,
)
