"""How a service's process behaves beside its requests."""

import subprocess
import sys

TRIMMED = """
import asyncio, ctypes
import psutil
from solrl_http.serving import trim_memory

libc, memory = ctypes.CDLL(None), psutil.Process().memory_info
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
blocks = [libc.malloc(100_000) for _ in range(2001)]
for block in blocks:
    ctypes.memset(block, 1, 100_000)
full = memory().rss
for block in blocks[:-1]:
    libc.free(block)
assert memory().rss > full - 50_000_000, "glibc itself returns memory below a block in use"

async def wait():
    trimming = asyncio.create_task(trim_memory(interval=0.01))
    while memory().rss > full - 150_000_000:
        await asyncio.sleep(0.01)
    trimming.cancel()

asyncio.run(wait())
"""


def test_freed_memory_below_a_block_in_use_returns_to_the_system() -> None:
    subprocess.run([sys.executable, "-c", TRIMMED], check=True, timeout=600)
