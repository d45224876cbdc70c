"""Stores of runs: their adapter versions, curves and samples, in this process or in Redis for all replicas."""

from solrl_rollout.store.errors import StoreUrlError
from solrl_rollout.store.memory_store import MemoryRunStore
from solrl_rollout.store.run_store import DEFAULT_RETAIN, RunStore

__all__ = ["DEFAULT_RETAIN", "MemoryRunStore", "RunStore", "open_store"]


def open_store(url: str | None, retain: int = DEFAULT_RETAIN, quota: int | None = None) -> RunStore:
    """Return the store at `url`: `memory://` (also None), `redis://`, `rediss://` or `unix://`.

    Does not connect yet; `ping` checks whether the store can be reached.

    Raises:
        StoreUrlError: any other URL.
    """
    if url is None or url == "memory://":
        return MemoryRunStore(retain, quota)
    scheme, separator, _ = url.partition("://")
    if separator and scheme in ("redis", "rediss", "unix"):
        from solrl_rollout.store.redis_store import RedisRunStore

        return RedisRunStore(url, retain, quota)
    scheme_text = f"the scheme {scheme}://" if separator else "no scheme"
    raise StoreUrlError(
        f"the store URL has {scheme_text}; expected memory://, redis://, rediss:// or unix://; omit it to keep "
        "adapters in this process"
    )
