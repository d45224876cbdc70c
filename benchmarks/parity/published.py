"""Public code that is run without importing its modules, whose dependencies are missing here, and what it is given."""

import ast
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Published:
    """A clone of a public repository.

    Attributes:
        folder: root of the clone.
    """

    folder: Path

    @property
    def commit(self) -> str:
        command = ["git", "-C", str(self.folder), "rev-parse", "HEAD"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def definitions(self, files: Sequence[str], names: Sequence[str], given: Mapping[str, Any]) -> dict[str, Any]:
        """Functions and classes of a file, executed without the rest of it.

        Args:
            files: possible paths of the file; the first that exists is read.
            names: top-level functions and classes.
            given: global names that they use.

        Raises:
            LookupError: no such file, or no such definition in it.
        """
        path, tree = self._parsed(files)
        found = [node for node in tree.body if getattr(node, "name", None) in names]
        if len(found) < len(names):
            raise LookupError(f"{path} defines {[getattr(node, 'name', None) for node in found]}; expected {names}")
        values = dict(given)
        exec(compile(ast.Module(found, []), str(path), "exec"), values)
        return {name: values[name] for name in names}

    def run_statements(self, files: Sequence[str], first: str, last: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Execute consecutive statements from within a function, and return all names afterwards.

        Args:
            files: possible paths of the file; the first that exists is read.
            first, last: targets of the first and of the last assignment, as written, e.g. `a["b"]`, or a whole call.
            given: names that they use.

        Raises:
            LookupError: no such file, or no such statements in it.
        """
        path, tree = self._parsed(files)
        for block in _blocks(tree):
            targets = [_target(node) for node in block]
            if first in targets and last in targets:
                own = block[targets.index(first) : targets.index(last) + 1]
                values = dict(given)
                exec(compile(ast.Module(own, []), str(path), "exec"), values)
                return values
        raise LookupError(f"{path} has no statements from {first!r} to {last!r}")

    def _parsed(self, files: Sequence[str]) -> tuple[Path, ast.Module]:
        for file in files:
            path = self.folder / file
            if path.is_file():
                return path, ast.parse(path.read_text(encoding="utf-8"))
        raise LookupError(f"{self.folder} has none of {list(files)}; expected a clone of the algorithm's public code")


def normals(*shape: int) -> torch.Tensor:
    """Normal values in float64, always the same ones: the stream is equal in every version of numpy."""
    return torch.from_numpy(np.random.RandomState(0).standard_normal(shape))


Values = Mapping[str, torch.Tensor | float]


def values_of(loss: torch.Tensor, v: torch.Tensor, others: Values) -> Values:
    """The values that are compared: a loss, its gradient with respect to `v`, and others."""
    (gradient,) = torch.autograd.grad(loss, v)
    return {"loss": loss, "gradient": gradient, **others}


def of_cases(cases: Mapping[str, Any], values: Callable[[Any], Values]) -> dict[str, torch.Tensor]:
    """Values of all cases, under names with theirs; those of the case "" under their own."""
    return {
        f"{name}, {case}" if case else name: torch.as_tensor(value).detach().flatten()
        for case, settings in cases.items()
        for name, value in values(settings).items()
    }


def _target(node: ast.stmt) -> str | None:
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0])
    return ast.unparse(node) if isinstance(node, ast.Expr) else None


def _blocks(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            yield body
