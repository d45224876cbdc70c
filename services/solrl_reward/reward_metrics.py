"""Metrics of a reward service for Prometheus."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import Gauge
from prometheus_client.core import CounterMetricFamily
from solrl_http.request_metrics import RequestMetrics

_IMAGES = (1, 2, 4, 8, 16, 24, 32, 64, 128, 256)


class RewardMetrics(RequestMetrics):
    """Counters of scores. The values of all labels are bounded: rewards come from the settings, tenants from tokens."""

    def __init__(self) -> None:
        super().__init__()
        self._images = self._counter("scored_images", "Images scored.", "reward", "tenant")
        self._seconds = self._histogram("score_seconds", "Seconds to score a batch with the reward.", "reward")
        self._batch = self._histogram("score_batch_images", "Images scored together.", buckets=_IMAGES)
        self._faults = self._counter("score_errors", "Requests on whose images the reward failed.", "reward")
        self._waiting = Gauge("solrl_score_queue_images", "Waiting images.", registry=self.registry)

    def watch_queue(self, read: Callable[[], int]) -> None:
        self._waiting.set_function(read)

    def watch_costs(self, read: Callable[[], Mapping[str, Mapping[str, int]]]) -> None:
        """Call `read` at every scrape: reward → kind, such as `prompt_tokens` → number used."""
        self._costs = read
        self.registry.register(self)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """What rewards used; called by the registry at each scrape."""
        text = "What rewards used of the services that they ask: requests, prompt_tokens, completion_tokens."
        family = CounterMetricFamily("solrl_reward_costs", text, labels=["reward", "kind"])
        for reward, costs in self._costs().items():
            for kind, number in costs.items():
                family.add_metric([reward, kind], number)
        yield family

    def batch_scored(self, images: int, seconds: dict[str, float]) -> None:
        self._batch.observe(images)
        for reward, spent in seconds.items():
            self._seconds.labels(reward).observe(spent)

    def request_scored(self, tenant: str, rewards: tuple[str, ...], images: int) -> None:
        for reward in rewards:
            self._images.labels(reward, tenant).inc(images)

    def reward_failed(self, reward: str) -> None:
        self._faults.labels(reward).inc()
