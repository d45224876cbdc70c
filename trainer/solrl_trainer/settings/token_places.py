"""Addresses of a settings file that this user's tokens would go to, though the user did not set them."""

import ipaddress
import logging
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from solrl_trainer.settings.presets import Resolved

logger = logging.getLogger(__name__)

_USER_SOURCES = ("--set", "command line")
"""Sources of settings that the user gave by hand."""


def warn_of_tokens(resolved: Resolved) -> None:
    """Name each token of a run that goes to another machine's address which a file of settings gave."""
    config, sources = resolved.config, resolved.sources
    if config.uses_service:
        _warn("SOLRL_TOKEN", config.service_url, "rollout_url", sources["rollout_url"])
    warn_of_reward_tokens(config.reward_options, sources["reward_options"])


def warn_of_reward_tokens(options: Mapping[str, Mapping[str, Any]], source: str) -> None:
    """The same for tokens of rewards alone: their options by name, and the source of these options."""
    for loader in options.values():
        for option, variable in (("at", "SOLRL_REWARD_TOKEN"), ("endpoint", "SOLRL_JUDGE_TOKEN")):
            if option in loader:
                _warn(variable, str(loader[option]), "reward_options", source)


def _warn(variable: str, address: str, key: str, source: str) -> None:
    token = os.environ.get(variable) or os.environ.get(f"{variable}_PATH")
    if token and source not in _USER_SOURCES and not _stays_here(address):
        logger.warning(
            f"the token in {variable} goes to {address}, by {key} in {source}; if that file is somebody else's, "
            f"stop, and unset {variable} or give an address of your own with --set"
        )


def _stays_here(address: str) -> bool:
    host = urlsplit(address).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
