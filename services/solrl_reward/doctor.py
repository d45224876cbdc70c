"""`solrl-reward doctor`: checks of this machine, the rewards and the settings, with a remedy for what is missing."""

from collections.abc import Iterator

from solrl_core import diagnosis
from solrl_core.diagnosis import Finding
from solrl_http.doctor import access_rows, port_row

from solrl_reward.settings import RewardSettings

_PACKAGES = ("torch", "safetensors", "numpy", "pillow")


def check(settings: RewardSettings) -> Iterator[Finding]:
    """Findings about everything that a service with these settings needs."""
    yield from diagnosis.machine(settings.device, None, _PACKAGES)
    yield from diagnosis.rewards(
        list(settings.sources),
        settings.options_from,
        options=settings.reward_options,
        sources=settings.sources,
        device=settings.torch_device,
    )
    yield from (Finding(*row) for row in (*access_rows(settings), port_row(settings)))
