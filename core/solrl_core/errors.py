"""Exceptions of the core, independent of HTTP; the service and the trainer translate them at their edges.

SolrlError
├── AdapterError   (ValueError)    an adapter file is refused
├── FidelityError  (ValueError)    a run's candidates rank as if drawn at random
├── MismatchError  (ValueError)    service and trainer would generate or score different images
├── PromptError    (ValueError)    a reward cannot judge by a prompt's text or metadata
└── RewardError    (RuntimeError)  a reward fails, or its scores cannot be used
    └── RewardUnavailableError     a reward server gives no usable answer
"""

import sysconfig
import traceback
from pathlib import Path
from typing import Any, Literal

from solrl_proto.printable import fault_text

AdapterFault = Literal["malformed", "metadata", "keys", "dtype", "shape", "nonfinite"]
Mismatch = Literal["noise", "digests", "size"]

_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
"""Folders of Python and of installed packages, whose places say less than the line that called them."""


class SolrlError(Exception):
    """Root of the core's exceptions.

    Attributes:
        title: the kind of fault, in a few words; may be empty.
        detail: what is wrong.
        where: the field, tensor or part at fault.
        got, expected: the value at fault, and what it should have been.
        action: the remedy.
    """

    title = ""

    def __init__(
        self,
        detail: str,
        *,
        where: str | None = None,
        got: Any = None,
        expected: Any = None,
        action: str | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.where = where
        self.got = got
        self.expected = expected
        self.action = action

    @property
    def fields(self) -> dict[str, Any]:
        """`where`, `got`, `expected` and `action` by name, as a problem document takes them."""
        return {"where": self.where, "got": self.got, "expected": self.expected, "action": self.action}

    def __str__(self) -> str:
        return fault_text(f"{self.title}: {self.detail}" if self.title else self.detail, **self.fields)


class AdapterError(SolrlError, ValueError):
    """An adapter file was refused; `fault` names the failed check."""

    title = "Adapter refused"

    def __init__(self, fault: AdapterFault, detail: str, **fields: Any) -> None:
        super().__init__(detail, **fields)
        self.fault = fault


class FidelityError(SolrlError, ValueError):
    """Exploration ranks candidates too differently from BF16 to choose by it."""


class MismatchError(SolrlError, ValueError):
    """Service and trainer differ in their noise contracts, digests or sizes of images; `fault` names the difference."""

    def __init__(self, fault: Mismatch, detail: str, **fields: Any) -> None:
        super().__init__(detail, **fields)
        self.fault = fault
        titles = {"noise": "Noise contracts differ", "digests": "Digests differ", "size": "Sizes of images differ"}
        self.title = titles[fault]


class PromptError(SolrlError, ValueError):
    """A reward cannot judge images by a prompt; `where` is the field, such as `metadata.include.0.count`."""

    def __str__(self) -> str:
        return self.detail


class RewardError(SolrlError, RuntimeError):
    """A reward failed on an image or returned unusable scores; `reward` is its name, `fault` what it did."""

    def __init__(self, reward: str, fault: str) -> None:
        super().__init__(f"reward {reward!r} {fault}")
        self.reward = reward
        self.fault = fault


class RewardUnavailableError(RewardError):
    """A reward server gave no usable answer, by no fault of the images; the same images may be scored later."""


def described(error: BaseException) -> str:
    """Type, text and place of an error in called code that is not ours: "KeyError: 'want' (my_rewards.py:12)"."""
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    called = traceback.extract_tb(error.__traceback__)[1:]
    frames = [frame for frame in called if not frame.filename.startswith(_INSTALLED)] or called
    return f"{message} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else message
