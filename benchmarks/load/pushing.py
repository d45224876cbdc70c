"""Push of a rank-32 FLUX.1 adapter (float32, 150 MB) through HTTP and Redis on loopback."""

import multiprocessing
import statistics
import sys
import tempfile
from pathlib import Path

from common import Layout, adapter_file, client_of, seconds_of
from fault_trials.adapters import MODEL
from solrl_core.families.load import locate
from solrl_core.families.skeleton import load_skeleton
from solrl_core.lora import adapter_layout
from support.targets import Row
from tests.support.ports import free_port
from tests.support.redis_server import running_redis
from tests.support.true_shapes import write_skeleton

PUSHES = 5


def pushing() -> Row:
    """Measure seconds from the client's first byte to the acknowledgement, sent once the adapter is decoded."""
    with tempfile.TemporaryDirectory() as folder:
        skeleton = load_skeleton(str(write_skeleton("flux", Path(locate("mini-flux")), Path(folder, "flux"))))
        layout = adapter_layout(skeleton.transformer, skeleton.lora_targets)
    port, times = free_port(), []
    with running_redis("everysec") as redis:
        serving = multiprocessing.Process(target=_serve, args=(port, redis.url, layout))
        serving.start()
        try:
            bodies = [adapter_file(layout, rank=32, seed=seed) for seed in range(2)]
            with client_of(f"http://127.0.0.1:{port}") as client:
                client.models()  # asks until it is ready
                for i in range(PUSHES):
                    parent, body = i - 1 if i else None, bodies[i % 2]
                    times.append(seconds_of(lambda i=i, p=parent, b=body: client.push("flux", i, p, MODEL, b)))
        finally:
            serving.terminate()
            serving.join()
    median = statistics.median(times)
    size = len(bodies[0])
    return Row(
        f"push of a rank-32 FLUX.1 adapter ({size / 1e6:.0f} MB)",
        "≤ 3 s until ready in memory",
        f"{median:.2f} s (of {PUSHES}: {min(times):.2f} to {max(times):.2f})",
        median <= 3.0,
        {"bytes": size, "seconds": times, "modules": len(layout)},
    )


def _serve(port: int, redis_url: str, layout: Layout) -> None:
    """Serve a miniature whose adapters have FLUX.1's layout."""
    from solrl_rollout.__main__ import main
    from solrl_rollout.engine import adapters

    decode = adapters.decode_adapter
    adapters.decode_adapter = lambda body, _: decode(body, layout)  # type: ignore[assignment]
    sys.argv = ["solrl-rollout", "serve", "--model", MODEL, "--port", str(port), "--redis-url", redis_url]
    main()
