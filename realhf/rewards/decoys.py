"""Decoys: tests that must fail, which find code that deceives the tests in its own process.

Code and tests share an interpreter, so code can return an object that equals everything, read the expected
value off the test's own frame, or replace what judges it. Such code passes a wrong test as well.
"""

import ast
import random
from collections.abc import Iterator, Sequence
from typing import Any

from realhf.rewards.sandbox import Sandbox

_random = random.SystemRandom()


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

    It expects another value in one of the test's assertions of the form `assert call == literal`. A test
    without one that is certain to run gets an assertion at its end that is false.
    """
    tree = ast.parse(test)
    literals = list(_expected(tree))
    if not literals:
        number = _random.randrange(100)
        return f"{test}\nassert {number} == {number + 1}"
    comparison, side = _random.choice(literals)
    value = ast.parse(repr(_other(ast.literal_eval(_side(comparison, side)))), mode="eval").body
    if side == "left":
        comparison.left = value
    else:
        comparison.comparators[0] = value
    return ast.unparse(tree)


def _expected(tree: ast.Module) -> Iterator[tuple[ast.Compare, str]]:
    """Yield the comparisons with a literal in assertions that are certain to run, and the literal's side.

    Those are at the top level, and in functions without a `return` that are called there.
    """
    called = {node.value.func.id for node in tree.body
              if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
              and isinstance(node.value.func, ast.Name)}  # fmt: skip
    bodies = [tree.body]
    bodies += [node.body for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in called
               and not any(isinstance(n, ast.Return | ast.Yield | ast.YieldFrom) for n in ast.walk(node))]
    for node in (node for body in bodies for node in body):
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare) and len(node.test.ops) == 1:
            sides = [side for side in ("left", "right") if _is_literal(_side(node.test, side))]
            if isinstance(node.test.ops[0], ast.Eq) and len(sides) == 1:
                yield node.test, sides[0]


def _side(comparison: ast.Compare, side: str) -> ast.expr:
    return comparison.left if side == "left" else comparison.comparators[0]


def _is_literal(node: ast.expr) -> bool:
    try:
        repr(ast.literal_eval(node))
    except (ValueError, TypeError, RecursionError):
        return False
    return True


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
