"""How a service's process is set up before it serves."""

import subprocess
import sys
from pathlib import Path

ARENAS = """
import ctypes, sys, threading
from solrl_http.serving import fix_malloc

fix_malloc()
libc, held = ctypes.CDLL(None), threading.Barrier(9)
libc.fopen.restype = ctypes.c_void_p

def hold():
    libc.malloc(1000)
    held.wait()
    held.wait()

for _ in range(8):
    threading.Thread(target=hold).start()
held.wait()
file = ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
held.wait()
"""


def test_eight_threads_share_two_arenas_of_memory(tmp_path: Path) -> None:
    file = tmp_path / "arenas.xml"
    subprocess.run([sys.executable, "-c", ARENAS, str(file)], check=True, timeout=600)
    assert file.read_text().count("<heap nr=") == 2
