"""Metrics of a reward service for Prometheus."""

from collections.abc import Callable

from prometheus_client import Gauge
from solrl_http.metrics import RequestMetrics

_IMAGES = (1, 2, 4, 8, 16, 24, 32, 64, 128, 256)


class Metrics(RequestMetrics):
    """Counters of scores. The values of all labels are bounded: rewards come from the settings, tenants from tokens."""

    def __init__(self) -> None:
        super().__init__()
        self._images = self._counter("scored_images", "Images scored.", "reward", "tenant")
        self._seconds = self._histogram("score_seconds", "Seconds to score a batch with the reward.", "reward")
        self._batch = self._histogram("score_batch_images", "Images scored together.", buckets=_IMAGES)
        self._faults = self._counter("score_errors", "Requests on whose images the reward failed.", "reward")
        self._waiting = Gauge("solrl_score_queue_images", "Waiting images.", registry=self.registry)

    def watch_queue(self, read: Callable[[], int]) -> None:
        """Read the number of waiting images with `read` at every scrape."""
        self._waiting.set_function(read)

    def batch_scored(self, images: int, seconds: dict[str, float]) -> None:
        """Count a batch and the seconds of each reward."""
        self._batch.observe(images)
        for reward, spent in seconds.items():
            self._seconds.labels(reward).observe(spent)

    def request_scored(self, tenant: str, rewards: tuple[str, ...], images: int) -> None:
        """Count the images of an answered request."""
        for reward in rewards:
            self._images.labels(reward, tenant).inc(images)

    def reward_failed(self, reward: str) -> None:
        """Count a request on whose images a reward failed."""
        self._faults.labels(reward).inc()
