"""Bodies take no more memory than they have bytes."""

import subprocess
import sys

MIB = 2**20

# A process of its own, whose heap has no holes yet. Each turn of the event loop adds a part to every body.
_COLLECTS = '''
import asyncio, sys
from pathlib import Path
from solrl_http.limits.bodies import read_body
from solrl_http.serving import fix_malloc
from starlette.requests import ClientDisconnect, Request

PART = 64 * 1024

def memory(kind):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))

async def post(parts, complete):
    """Send that many parts, which differ; then hang up, unless the body is complete."""
    given = 0
    async def receive():
        nonlocal given
        await asyncio.sleep(0)
        if given == parts:
            return {"type": "http.disconnect"}
        given += 1
        return {"type": "http.request", "body": bytes([given % 256]) * PART, "more_body": given < parts or not complete}
    request = Request({"type": "http", "headers": []}, receive)
    try:
        body = await read_body(request, 2**30, RuntimeError)
    except ClientDisconnect:
        assert not complete
    else:
        assert complete and len(body) == parts * PART
        assert body[::PART] == bytes(part % 256 for part in range(1, parts + 1))

async def rounds(count, complete, *parts):
    for most in parts:
        await asyncio.gather(*(post(most - i, complete) for i in range(count)))

fix_malloc()
asyncio.run(rounds(1, 1, 1))
Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS")
asyncio.run(rounds(*map(int, sys.argv[1:])))
print(memory("VmHWM") - before)
'''


def peak(count: int, complete: bool, *mib: int) -> int:
    """Most bytes that `count` bodies at once take; the largest has `mib`, in rounds one after the other."""
    arguments = [count, int(complete), *(16 * size for size in mib)]
    command = [sys.executable, "-c", _COLLECTS, *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_a_body_without_a_length_is_in_memory_once() -> None:
    assert peak(1, True, 64) <= 72 * MIB


def test_bodies_that_grow_beside_each_other_leave_no_holes() -> None:
    assert peak(16, False, 2, 3, 4, 5, 6) <= 16 * 6 * MIB + 8 * MIB
