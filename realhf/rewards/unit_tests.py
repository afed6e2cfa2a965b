"""UnitTests: a reward for code that passes the tests of its row, which run in a sandbox."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar

from realhf.errors import UserError
from realhf.rewards.answers import text_of
from realhf.rewards.decoys import without_deceit
from realhf.rewards.sandbox import Sandbox
from realhf.user_input.field_types import check_types, require

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_FORM = 'a text of test code, a list of them, or a list of {"input": text, "output": text}'


@dataclass(frozen=True)
class UnitTests:
    """A reward for the code in a completion: the share of the row's tests that it passes.

    The code is the last block between lines of three backticks, or the whole completion without one. The
    tests of a row are a text of Python such as assertions, a list of such texts, or a list of objects with
    `input` and `output`. Texts run after the code in its namespace, and pass if they raise nothing. For
    objects, the code runs as a program that reads `input` from standard input, and must print `output`;
    spaces at the ends of lines do not count. Both run in a sandbox.

    Code that has passed a text runs again with a text that is changed to be wrong: if it passes that too, it
    has deceived the test, and the reason is `deceived`. Code can still deceive a test that runs in its
    process in other ways; it cannot deceive one with output.
    """

    tests_key: str = "tests"  # The column with the tests.
    all_or_nothing: bool = False  # Whether the reward is 1 if all tests pass, else 0.
    sandbox: Sandbox = field(default_factory=Sandbox)
    concurrency: int = 8  # How many programs of a rank run at once.
    __name__: ClassVar[str] = "unit_tests"

    def __post_init__(self) -> None:
        check_types(self, "UnitTests.")
        require(self.concurrency >= 1, "UnitTests.concurrency", self.concurrency, "be at least 1")

    @property
    def column_names(self) -> tuple[str, ...]:
        """The columns that the reward reads."""
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
            results = list(pool.map(lambda pair: self._results(code_of(text_of(pair[0])), pair[1]), pairs))
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

    def _results(self, code: str, tests: Any) -> list[str]:
        """Return for each test whether it has passed, or why not."""
        if not tests:
            return []
        several = [tests] if isinstance(tests, str | Mapping) else tests
        if isinstance(several, list) and all(isinstance(test, str) for test in several):
            return without_deceit(self.sandbox, code, several, self.sandbox.run(code, several).tests)
        if isinstance(several, list) and all(_is_program_test(test) for test in several):
            return [self._program_result(code, test) for test in several]
        raise UserError(f"UnitTests: column {self.tests_key!r} has {str(tests)[:80]!r}: it must be {_FORM}")

    def _program_result(self, code: str, test: Mapping[str, str]) -> str:
        execution = self.sandbox.run(code, stdin=test["input"], as_program=True)
        if execution.reason not in ("passed", "ended"):
            return execution.reason
        return "passed" if _lines(execution.stdout) == _lines(test["output"]) else "wrong"


def code_of(completion: str) -> str:
    """Return the code of a completion: its last block of Python code, else the whole text."""
    blocks = _BLOCK.findall(completion)
    return blocks[-1] if blocks else completion


def _is_program_test(test: Any) -> bool:
    is_object = isinstance(test, Mapping)
    return is_object and all(isinstance(test.get(key), str) for key in ("input", "output"))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
