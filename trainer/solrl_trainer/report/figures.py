"""How figures of a run read to a person, alike in the terminal and in the report."""

_SHARES = {"verifier": "strict accuracy"}
"""Rewards that are a share of images, shown in per cent, and what they are called."""


def reward_label(name: str) -> str:
    """A reward's name to show."""
    return f"{_SHARES[name]} ({name})" if name in _SHARES else name


def reward_axis(name: str) -> tuple[str, float]:
    """An axis' title, and what values on it are multiplied by."""
    return (f"{reward_label(name)}, %", 100.0) if name in _SHARES else (reward_label(name), 1.0)


def reward_text(name: str, value: float) -> str:
    """A mean reward."""
    return f"{100 * value:.1f} %" if name in _SHARES else f"{value:.4f}"


def gain_text(name: str, gain: float) -> str:
    """A gain with its sign; points for shares."""
    return f"{100 * gain:+.1f} points" if name in _SHARES else f"{gain:+.4f}"


def interval_text(name: str, low: float, high: float) -> str:
    """A gain's interval."""
    return f"[{100 * low:+.1f}, {100 * high:+.1f}]" if name in _SHARES else f"[{low:+.4f}, {high:+.4f}]"


def duration_text(seconds: float) -> str:
    """Seconds as h, min and s."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"
