"""Push of a rank-32 FLUX.1 adapter (float32, 150 MB) through HTTP and Redis on loopback."""

import dataclasses
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import httpx
from common import Layout, adapter_file, client_of, seconds_of
from fault_trials.adapters import MODEL
from solrl_core.families.load import locate
from solrl_core.families.skeleton import load_skeleton
from solrl_core.lora import adapter_layout
from support.ports import free_port
from support.redis_server import running_redis
from support.targets import Row
from support.true_shapes import write_skeleton

PUSHES = 5


def pushing() -> Row:
    """Measure seconds from the client's first byte to the acknowledgement, sent once the adapter is decoded."""
    with tempfile.TemporaryDirectory() as folder:
        layout = flux_layout(Path(folder))
    port, stop = free_port(), multiprocessing.Event()
    with running_redis("everysec") as redis:
        serving = multiprocessing.Process(target=_serve, args=(port, redis.url, layout, stop))
        serving.start()
        try:
            _wait(f"http://127.0.0.1:{port}", serving)
            bodies = [adapter_file(layout, rank=32, seed=seed) for seed in range(2)]
            times = []
            with client_of(f"http://127.0.0.1:{port}") as client:
                for i in range(PUSHES):
                    parent, body = i - 1 if i else None, bodies[i % 2]
                    times.append(seconds_of(lambda i=i, p=parent, b=body: client.push("flux", i, p, MODEL, b)))
        finally:
            stop.set()
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


def flux_layout(folder: Path) -> Layout:
    """Modules that a LoRA adapter of FLUX.1 adapts and their sizes, from the model's configuration."""
    skeleton = load_skeleton(str(write_skeleton("flux", Path(locate("mini-flux")), folder / "flux")))
    return adapter_layout(skeleton.transformer, skeleton.lora_targets)


def _serve(port: int, redis_url: str, layout: Layout, stop: Event) -> None:
    """Serve the real application with a miniature whose adapter layout is replaced by FLUX.1's."""
    import asyncio

    import uvicorn
    from solrl_http.serving import bind
    from solrl_rollout.http.app import create_app
    from solrl_rollout.settings import RolloutSettings

    async def run() -> None:
        app = create_app(RolloutSettings(redis_url=redis_url))
        async with app.router.lifespan_context(app):
            hosted = app.state.service.hosted
            hosted[MODEL] = dataclasses.replace(hosted[MODEL], adapter_layout=layout)
            server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="warning"))
            serving = asyncio.create_task(server.serve([bind("127.0.0.1", port)]))
            await asyncio.to_thread(stop.wait)
            server.should_exit = True
            await serving

    asyncio.run(run())


def _wait(url: str, serving: multiprocessing.Process) -> None:
    while serving.is_alive():
        try:
            if httpx.get(f"{url}/health/ready").is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.3)
    raise RuntimeError("the service ended before it was ready")
