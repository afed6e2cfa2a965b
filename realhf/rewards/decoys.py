"""Decoys: tests that must fail, which find code that deceives the tests in its own process.

Code and tests share an interpreter, so code can return an object that equals everything, read the expected
value off the test's own frame, or replace what judges it. Such code passes a wrong test as well.
"""

import ast
import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from realhf.rewards.sandbox import Sandbox

_random = random.SystemRandom()
_PARSING = threading.Lock()
"""Python 3.11 counts the depth of a syntax tree for all threads together, so that two which parse at once may
fail with a SystemError (https://github.com/python/cpython/issues/106905)."""


def without_deceit(sandbox: Sandbox, code: str, tests: Sequence[str], results: Sequence[str]) -> list[str]:
    """Return the tests' results, in which `passed` is `deceived` if the code also passes a decoy of a test.

    The code runs once more for that, in a process of its own, if it has passed a test.
    """
    passed = [test for test, result in zip(tests, results, strict=True) if result == "passed"]
    if not passed or "passed" not in sandbox.run(code, [decoy(test) for test in passed]).tests:
        return list(results)
    return ["deceived" if result == "passed" else result for result in results]


def decoy(test: str) -> str:
    """Return a test that every program fails that passes this one.

    It expects another value in one of the test's assertions, such as `assert call == literal`. A test without
    one that is certain to run gets an assertion at its end that is false.
    """
    # Long expressions are nested too deeply, long numbers cannot be written, other threads may parse, too.
    with suppress(RecursionError, MemoryError, ValueError, OverflowError, SystemError):
        with _PARSING:
            tree = ast.parse(test)
        if changes := list(_changes(tree)):
            literal, value = _random.choice(changes)
            other = ast.parse(repr(value), mode="eval").body
            return ast.unparse(_Replacement(literal, other).visit(tree))
    number = _random.randrange(100)
    return f"{test}\nassert {number} == {number + 1}"


class _Replacement(ast.NodeTransformer):
    """Puts a node in the place of another."""

    def __init__(self, old: ast.expr, new: ast.expr) -> None:
        self._old = old
        self._new = new

    def visit(self, node: ast.AST) -> Any:
        return self._new if node is self._old else self.generic_visit(node)


def _changes(tree: ast.Module) -> Iterator[tuple[ast.expr, Any]]:
    """Yield literals in assertions that are certain to run, each with a value that makes its assertion false.

    Such assertions are at the top level, and in functions without a `return` that are called there. Names
    that have another meaning somewhere in the test are left out.
    """
    called = {node.value.func.id: place for place, node in enumerate(tree.body)
              if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
              and isinstance(node.value.func, ast.Name)}  # fmt: skip
    meanings = Counter(name for node in ast.walk(tree) for name in _bound_names(node))
    bodies = [tree.body]
    bodies += [node.body for place, node in enumerate(tree.body)
               if isinstance(node, ast.FunctionDef) and called.get(node.name, -1) > place
               and meanings[node.name] == 1 and not node.decorator_list
               and not any(isinstance(n, ast.Return | ast.Yield | ast.YieldFrom) for n in ast.walk(node))]
    for node in (node for body in bodies for node in body):
        if isinstance(node, ast.Assert) and (change := _change(node.test)) is not None:
            yield change


def _bound_names(node: ast.AST) -> list[str]:
    """Return the names to which a node of a program gives a meaning, in whatever scope."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
            return [name]
        case ast.alias(name=name, asname=other):
            return [other or name]
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            return [name]
    return []


def _change(asserted: ast.expr) -> tuple[ast.expr, Any] | None:
    """Return the literal that an assertion expects, and another value for it.

    The assertion may be `a == b`, `abs(a - b) < c` or `isclose(a, b)`, where a or b is the literal.
    """
    match asserted:
        case ast.Compare(left=a, ops=[ast.Eq()], comparators=[b]) if _is_literal(a) != _is_literal(b):
            literal = a if _is_literal(a) else b
            return literal, _other(ast.literal_eval(literal))
        case ast.Compare(
            left=ast.Call(func=ast.Name(id="abs"), args=[ast.BinOp(left=a, op=ast.Sub(), right=b)]),
            ops=[ast.Lt() | ast.LtE()], comparators=[c],
        ) if _is_number(a) != _is_number(b) and _is_number(c):
            literal = a if _is_number(a) else b
            return literal, _far_from(ast.literal_eval(literal), tolerance=ast.literal_eval(c))
        case ast.Call(func=ast.Name(id="isclose") | ast.Attribute(attr="isclose"), args=[a, b, *_]) if (
            _is_number(a) != _is_number(b)
        ):
            literal = a if _is_number(a) else b
            return literal, _far_from(ast.literal_eval(literal), tolerance=1.0)
    return None


def _is_literal(node: ast.expr) -> bool:
    try:
        repr(ast.literal_eval(node))
    except (ValueError, TypeError, RecursionError):
        return False
    return True


def _is_number(node: ast.expr) -> bool:
    return _is_literal(node) and isinstance(ast.literal_eval(node), int | float)


def _far_from(value: float, *, tolerance: float) -> float:
    """Return a number that is not even nearly this one."""
    return 4 * (abs(value) + abs(tolerance) + 1)


def _other(value: Any) -> Any:
    """Return a value that looks like this one and does not equal it."""
    other: Any
    if isinstance(value, bool):
        other = not value
    elif isinstance(value, int | float | complex):
        other = value + 1 if value + 1 != value else 0
    elif isinstance(value, str):
        other = value + "s"
    elif isinstance(value, bytes):
        other = value + b"s"
    elif isinstance(value, list | tuple) and value:
        other = type(value)([*value[:-1], _other(value[-1])])
    elif isinstance(value, set) and value:
        other = value - {next(iter(value))}
    elif isinstance(value, list | tuple | set):
        other = type(value)(["other"])
    elif isinstance(value, dict):
        key = next(reversed(value), "other")
        other = {**value, key: _other(value.get(key))}
    else:  # None or an ellipsis.
        other = 0
    return other
