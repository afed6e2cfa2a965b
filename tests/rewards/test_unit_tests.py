"""UnitTests: code of a completion against the tests of its row."""

import platform

import pytest

from realhf import Sandbox, UnitTests
from realhf.errors import UserError
from realhf.rewards.reward import reward_columns
from realhf.rewards.unit_tests import code_of

pytestmark = pytest.mark.skipif(platform.system() != "Linux", reason="the sandbox needs Linux")
RIGHT = "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
HALF = "```python\ndef add(a, b):\n    return 2 * a\n```"
CHAT = [{"role": "assistant", "content": RIGHT}]
ASSERTIONS = ["assert add(1, 1) == 2", "assert add(1, 2) == 3"]
PROGRAM = "```py\na, b = map(int, input().split())\nprint(a + b)\n```"
PAIRS = [{"input": "1 2\n", "output": "3\n"}, {"input": "2 2", "output": "4"}]


def test_the_code_is_the_last_block():
    assert code_of("```python\nx = 1\n```\nor\n```python\nx = 2\n```") == "x = 2\n"
    assert code_of("x = 1") == "x = 1" and code_of("```\nx = 1") == "x = 1"


def test_the_reward_is_the_share_of_tests():
    reward = UnitTests()
    assert reward_columns(reward, ["answer"]) == ("tests",)
    wrong = "```python\ndef add(a, b):\n    raise ValueError\n```"
    completions = [RIGHT, HALF, wrong, "I do not know", CHAT, RIGHT, RIGHT]
    tests = [ASSERTIONS] * 5 + [[], "\n".join(ASSERTIONS)]
    metrics: dict[str, float] = {}
    extra = {}
    scores = reward(
        completions=completions, tests=tests, log_metric=metrics.__setitem__, log_extra=extra.__setitem__)
    assert scores == [1.0, 0.5, 0.0, 0.0, 1.0, None, 1.0]
    assert extra == {
        "unit_tests/reason": ["passed", "wrong", "error", "error", "passed", "passed", "passed"]}
    assert metrics == {"unit_tests/passed": 4 / 7, "unit_tests/wrong": 1 / 7, "unit_tests/error": 2 / 7}
    strict = UnitTests(all_or_nothing=True)
    assert strict(completions=[RIGHT, HALF], tests=[ASSERTIONS] * 2) == [1.0, 0.0]


def test_programs_are_compared_by_what_they_print():
    slow = "```python\nif input() == '1 2': print(3)\nwhile True: pass\n```"
    once = "```python\nprint(3)\n```"
    reward = UnitTests("pairs", sandbox=Sandbox(cpu_seconds=1))
    assert reward(completions=[PROGRAM, once, slow], pairs=[PAIRS] * 2 + [PAIRS[:1]]) == [1.0, 0.5, 0.0]
    assert reward(completions=[PROGRAM], pairs=[PAIRS[0]]) == [1.0]


@pytest.mark.parametrize("tests", [3, [1], [{"input": "1"}], ["a", {"input": "", "output": ""}]])
def test_other_tests_are_refused(tests):
    with pytest.raises(UserError, match="UnitTests: column 'tests' has .*: it must be a text of test code"):
        UnitTests()(completions=[RIGHT], tests=[tests])
