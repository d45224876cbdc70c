"""Formatting of a run's figures, shared by the terminal and the report."""

_SHARES = {"verifier": "strict accuracy"}
"""Rewards that are a share of images → their label. They are shown in per cent."""


def reward_label(name: str) -> str:
    """Label of a reward."""
    return f"{_SHARES[name]} ({name})" if name in _SHARES else name


def reward_axis(name: str) -> tuple[str, float]:
    """Title of a reward's axis, and the factor on its values."""
    return (f"{reward_label(name)}, %", 100.0) if name in _SHARES else (reward_label(name), 1.0)


def reward_text(name: str, value: float) -> str:
    """Format a mean reward."""
    return f"{100 * value:.1f} %" if name in _SHARES else f"{value:.4f}"


def gain_text(name: str, gain: float) -> str:
    """Format a gain with its sign; in points for shares."""
    return f"{100 * gain:+.1f} points" if name in _SHARES else f"{gain:+.4f}"


def interval_text(name: str, low: float, high: float) -> str:
    """Format the interval of a gain."""
    return f"[{100 * low:+.1f}, {100 * high:+.1f}]" if name in _SHARES else f"[{low:+.4f}, {high:+.4f}]"


def duration_text(seconds: float) -> str:
    """Format seconds as h, min and s."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"
