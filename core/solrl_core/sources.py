"""Source code of an object: its definition, and the statements of its module that the definition uses."""

import ast
import inspect
import threading
from collections.abc import Iterator, Sequence, Set
from functools import lru_cache
from typing import Any

_PARSING = threading.Lock()
"""Python 3.11's parser counts its depth for all threads in one place (python/cpython#106905)."""


def own_source(thing: Any) -> str:
    """Definition of a function, class or instance, with the module's top-level statements that it uses by name.

    A statement is used if it defines or changes a name that a used statement mentions. Comments and docstrings within
    those statements are included; everything else in the module is not. Code of other modules is not included, base
    classes neither, nor names that are composed at run time (`globals()[…]`, `getattr`). For an object that no
    statement of its module names, the source is the whole module.

    Raises:
        OSError: the source is not on this machine.
        TypeError: the object is built-in.
    """
    defined = thing if hasattr(thing, "__qualname__") else getattr(thing, "func", type(thing))
    module = inspect.getmodule(defined)
    if module is None:
        return inspect.getsource(defined)
    # Names of the object in its module, as in `bright = partial(brightness, least=0.5)`.
    names = {name for name, value in vars(module).items() if value is thing}
    return _excerpt(inspect.getsource(module), frozenset({*names, defined.__qualname__.partition(".")[0]}))


@lru_cache(maxsize=64)  # a run asks several times, and a large module takes a tenth of a second
def _excerpt(source: str, names: frozenset[str]) -> str:
    """Statements of a module's source that define these names, with those that they use."""
    with _PARSING:
        statements = ast.parse(source).body
    used = _used(statements, names)
    lines = source.splitlines()
    return "\n".join("\n".join(lines[_first_line(one) - 1 : one.end_lineno]) for one in used) if used else source


def _used(statements: Sequence[ast.stmt], names: Set[str]) -> list[ast.stmt]:
    """Statements, in order, that define or change one of these names, or a name that such a statement mentions."""
    known, used = set(names), set()
    changes = [set(_changed_names(statement)) for statement in statements]
    while found := [i for i, changed in enumerate(changes) if i not in used and changed & known]:
        used.update(found)
        for i in found:
            known.update(node.id for node in ast.walk(statements[i]) if isinstance(node, ast.Name))
    return [statements[i] for i in sorted(used)]


def _changed_names(statement: ast.stmt) -> Iterator[str]:
    """Names that a top-level statement defines (`a = …`), or whose objects it changes (`a[0] = …`, `a.add(…)`)."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
        return
    for node in ast.walk(statement):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]
        elif isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            yield from _root(node)
        elif isinstance(node, ast.Expr):
            called = getattr(node.value, "func", None)
            yield from _root(called) if isinstance(called, ast.Attribute) else ()


def _root(node: ast.expr) -> Iterator[str]:
    """The name that an expression such as `a.b[0].c` begins with."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    if isinstance(node, ast.Name):
        yield node.id


def _first_line(statement: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])
