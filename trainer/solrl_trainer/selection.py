"""Which candidates of a group are kept; the service prunes by the same rule."""

from solrl_core.selection import best_worst

__all__ = ["best_worst"]
