"""UnitTests: a reward for code that passes the tests of its row, which run in a sandbox.

Code and tests share an interpreter, so code can return an object that equals everything, read the expected
value off the test's own frame, or replace what judges it. Such code also passes a decoy: a test that is
changed so that every program which passes the test itself must fail.
"""

from __future__ import annotations

import ast
import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from realhf.errors import UserError
from realhf.rewards.answers import NEARLY_ONE, THINKING_ENDS, after_thinking, text_of
from realhf.rewards.sandbox import Sandbox
from realhf.user_input.field_types import check_types, require

if TYPE_CHECKING:
    from markdown_it.token import Token


_random = random.SystemRandom()
_PARSING = threading.Lock()
"""Python 3.11 counts the depth of a syntax tree for all threads together, so that two which parse at once may
fail with a SystemError (https://github.com/python/cpython/issues/106905)."""
_PYTHON = re.compile(r"[{.\s]*(?:i?python|py)(?:[\s-]?\d[\d.]*)?(?![\w-])", re.IGNORECASE)
"""What follows the opening fence of a block of Python begins so: python, py, python3, {.python}, ..."""
_DEFINITION = re.compile(r"^[ \t]*(?:(?:async[ \t]+)?def|class)[ \t]", re.MULTILINE)
_OUTPUT = re.compile(r"\bprint\s*\(|\bstdout\b")
_FENCE_AT_END = re.compile(r"^(.*?)(?<!`)(```+[\w+.-]*)[ \t]*$")
"""It begins at the first backtick of a run only, so that long runs take no long time."""
_TEXT_BEHIND_FENCE = re.compile(r"^([ \t>]*```+)[ \t]+(\S+[ \t]+\S.*)$")
_MARKERS = " \t>-*+.)0123456789"  # What may stand before a fence, in lists and quotations.
_BROKEN_LIMITS = ("timeout", "processes", "memory", "files", "output", "network", "killed")
"""Reasons for which the further tests of a program do not run."""
_FORM = 'a text of test code, a list of them, or a list of {"input": text, "output": text}'


@dataclass(frozen=True)
class UnitTests:
    """A reward for the code in a completion: the share of the row's tests that it passes.

    The code is a block of the completion, which is read as Markdown; see `code_of`. The tests of a row are a
    text of Python such as assertions, a list of such texts, or a list of objects with `input` and `output`.
    Texts run after the code in its namespace, and pass if they raise nothing. For objects, the code runs as a
    program that reads `input` from standard input, and must print `output`; spaces at the ends of lines do
    not count. Both run in a sandbox. After the first test that breaks one of its limits, such as the time, no
    other test of the completion runs, and after the first failure neither does with `all_or_nothing`; tests
    that have not run are not passed.

    Code that has passed a text runs again with a text that is changed to be wrong: if it passes that too, it
    has deceived the test, and the reason is `deceived`. Code can still deceive a test that runs in its
    process in other ways; it cannot deceive one with output.
    """

    tests_key: str = "tests"  # The column with the tests.
    all_or_nothing: bool = False  # Whether the reward is 1 if all tests pass, else 0.
    sandbox: Sandbox = field(default_factory=Sandbox)
    concurrency: int = 8  # How many programs of a rank run at once.
    looks_for: ClassVar[tuple[str, ...]] = (THINKING_ENDS,)
    correct_above: ClassVar[float] = NEARLY_ONE
    __name__: ClassVar[str] = "unit_tests"

    def __post_init__(self) -> None:
        check_types(self, "UnitTests.")
        require(self.concurrency >= 1, "UnitTests.concurrency", self.concurrency, "be at least 1")

    @property
    def column_names(self) -> tuple[str, ...]:
        return (self.tests_key,)

    def __call__(
        self, completions: Sequence[Any], log_metric: Callable[[str, float], None] | None = None,
        log_extra: Callable[[str, list[Any]], None] | None = None, **columns: Any,
    ) -> list[float | None]:
        """Return the reward of each completion; None where the row has no tests.

        `log_extra` gets the column `unit_tests/reason` with the first failure of each completion, and
        `log_metric` the shares of completions with each.
        """
        pairs = list(zip(completions, columns[self.tests_key], strict=True))
        with ThreadPoolExecutor(self.concurrency, thread_name_prefix="tests") as pool:
            results = list(pool.map(lambda pair: self._results(text_of(pair[0]), pair[1]), pairs))
        reasons = [next((why for why in result if why != "passed"), "passed") for result in results]
        if log_extra is not None:
            log_extra("unit_tests/reason", list(reasons))
        if log_metric is not None:
            for reason, count in sorted(Counter(reasons).items()):
                log_metric(f"unit_tests/{reason}", count / len(reasons))
        return [self._reward(result) for result in results]

    def _reward(self, results: list[str]) -> float | None:
        if not results:
            return None
        passed = results.count("passed")
        return float(passed == len(results)) if self.all_or_nothing else passed / len(results)

    def _results(self, completion: str, tests: Any) -> list[str]:
        """Return for each test whether it has passed, or why not."""
        if not tests:
            return []
        several = [tests] if isinstance(tests, str | Mapping) else tests
        if isinstance(several, list) and all(isinstance(test, str) for test in several):
            code = code_of(completion, defines=True)
            return without_deceit(self.sandbox, code, several, self.sandbox.run(code, several).tests)
        if isinstance(several, list) and all(_is_program_test(test) for test in several):
            return self._program_results(code_of(completion), several)
        raise UserError(f"UnitTests: column {self.tests_key!r} has {str(tests)[:80]!r}: it must be {_FORM}")

    def _program_results(self, code: str, tests: Sequence[Mapping[str, str]]) -> list[str]:
        """Return the result of each test; those that are left out have the result of the last that ran."""
        results: list[str] = []
        for test in tests:
            results.append(self._program_result(code, test))
            if results[-1] in _BROKEN_LIMITS or (self.all_or_nothing and results[-1] != "passed"):
                break
        return results + results[-1:] * (len(tests) - len(results))

    def _program_result(self, code: str, test: Mapping[str, str]) -> str:
        execution = self.sandbox.run(code, stdin=test["input"], as_program=True)
        if execution.reason not in ("passed", "ended"):
            return execution.reason
        return "passed" if _lines(execution.stdout) == _lines(test["output"]) else "wrong"


def code_of(completion: str, *, defines: bool = False) -> str:
    """Return the program in a completion, which is read as Markdown (CommonMark).

    It is the last fenced block of Python; without any, the last one of no language; without such a block, the
    whole text. If the program `defines` what tests use, blocks without a function or class are passed over
    where another has one, as they show how it is used; otherwise blocks that print nothing are. Blocks in
    thinking, before `</think>`, do not count. A block may be indented, in a list or a quotation, and without
    an end.
    """
    text = after_thinking(text_of(completion))
    markdown = _with_fences_alone(text)
    readings = [_fences(markdown, without) for without in (["html_block"], ["html_block", "code"])]
    of_python = [[block.content for block in blocks if _PYTHON.match(block.info)] for blocks in readings]
    of_any = [[block.content for block in blocks if not block.info.strip()] for blocks in readings]
    programs = next(filter(None, (*of_python, *of_any)), [])
    sign = _DEFINITION if defines else _OUTPUT
    programs = [code for code in programs if sign.search(code)] or programs
    return programs[-1] if programs else text


def _fences(text: str, without: list[str]) -> list[Token]:
    """Return the fenced blocks of a text, read without some rules of CommonMark.

    Without `html_block`, a line such as `<think>` hides no fence; without `code`, indentation does not.
    """
    from markdown_it import MarkdownIt  # Imported here, as only code in answers needs it.

    parser = MarkdownIt("commonmark").disable(["reference", *without])
    parser.core.ruler.enableOnly(["normalize", "block"])
    return [token for token in parser.parse(text) if token.type == "fence"]


def _with_fences_alone(text: str) -> str:
    """Return a text in which fences that share a line with other text have lines of their own.

    CommonMark does not see them: one at the end of a line of text or code, and text behind a closing one.
    """
    lines = []
    is_open = False
    for line in text.split("\n"):
        parts = [line]
        fence = _FENCE_AT_END.match(line)
        if fence and line.count("```") == 1 and fence[1].strip(_MARKERS):
            parts = [fence[1], fence[2]] if not is_open or fence[2].endswith("`") else [line]
        elif is_open and (fence := _TEXT_BEHIND_FENCE.match(line)):
            parts = [fence[1], fence[2]]
        for part in parts:
            begins = part.lstrip(_MARKERS)
            is_open ^= begins.startswith("```") and (not is_open or not begins.strip("` \t"))
        lines += parts
    return "\n".join(lines)


def _is_program_test(test: Any) -> bool:
    is_object = isinstance(test, Mapping)
    return is_object and all(isinstance(test.get(key), str) for key in ("input", "output"))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


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
              and isinstance(node.value.func, ast.Name)}
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
