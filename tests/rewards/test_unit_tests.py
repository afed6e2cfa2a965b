"""UnitTests: code of a completion against the tests of its row."""

import platform
import time

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


CODE = "def add(a, b):\n    return a + b\n"
BLOCK = f"```python\n{CODE}```"


def _indented(text, by):
    return "".join(by + line for line in text.splitlines(keepends=True))


FORMS = {
    "no fence": CODE,
    "python3": f"```python3\n{CODE}```",
    "Python 3": f"```Python 3\n{CODE}```",
    "py": f"```py\n{CODE}```",
    "space before": f"``` python\n{CODE}```",
    "a title": f"```python title='add.py'\n{CODE}```",
    "braces": f"```{{.python}}\n{CODE}```",
    "no language": f"So:\n```\n{CODE}```",
    "spaces at the ends": f"```python  \n{CODE}```  ",
    "CRLF": f"So:\n{BLOCK}\nDone.".replace("\n", "\r\n"),
    "tildes": f"~~~\n{CODE}~~~",
    "four backticks": f"````python\n{CODE}````",
    "bash before": f"```bash\npip install add\n```\n{BLOCK}",
    "bash after": f"{BLOCK}\nThen:\n```sh\npython add.py\n```\n",
    "output after": f"{BLOCK}\nIt prints:\n```\n3\n```",
    "output after no language": f"```\n{CODE}```\nIt prints:\n```\n3\n```",
    "its use after": f"{BLOCK}\nFor example:\n```python\nprint(add(1, 2))\n```",
    "a draft before": f"```python\ndef add(a, b):\n    return 1\n```\nNo:\n{BLOCK}",
    "indented": _indented(BLOCK, "  "),
    "far indented": _indented(BLOCK, "      "),
    "far indented beside others": f"```sh\nls\n```\n{_indented(BLOCK, '      ')}\n\n```\n3\n```",
    "tab": _indented(BLOCK, "\t"),
    "list": f"1. Add them.\n\n{_indented(BLOCK, '   ')}\n2. Done.",
    "in a list's first line": "1. " + _indented(BLOCK, "   ").lstrip(),
    "nested lists": f"- a\n  - b\n{_indented(BLOCK, '    ')}",
    "quotation": _indented(BLOCK, "> "),
    "unclosed": f"So:\n```python\n{CODE}",
    "behind text": f"Here it is: {BLOCK}\nDone.",
    "closed behind code": f"```python\n{CODE.rstrip()}```\nDone.",
    "text behind the end": f"{BLOCK} This adds them.\nDone.",
    "fence in a docstring": BLOCK.replace("    return", "    '''Add:\n    ```\n    3'''\n    return"),
    "after thinking": f"<think>\n```python\nadd = 3\n```\n</think>\n{BLOCK}",
    "after unclosed thinking": f"<think>\n```python\nadd = 3\n</think>\n{BLOCK}",
    "html around": f"<answer>\n{BLOCK}\n</answer>",
}


@pytest.mark.parametrize("form", FORMS)
def test_ordinary_forms_of_a_right_program(form):
    found = {}
    exec(code_of(FORMS[form], defines=True), found)
    assert found["add"](1, 2) == 3


def test_a_program_is_the_block_that_prints():
    program = "n = int(input())\nprint(n + 1)\n"
    assert code_of(f"```\n{program}```\nFor 2 it prints:\n```\n3\n```") == program
    assert code_of(f"```py\nimport math\n```\n```py\n{program}```") == program


def test_an_endless_loop_runs_once():
    """The first program that breaks a limit is the last; wrong ones go on, unless all have to pass."""
    runs = []

    class Counted(Sandbox):
        def run(self, code, tests=(), **options):
            runs.append(options["stdin"])
            return super().run(code, tests, **options)

    box = Counted(cpu_seconds=1)
    pairs = [{"input": f"{i} 1", "output": str(i + 1)} for i in range(6)]
    loop = "```python\na, b = map(int, input().split())\nwhile a == 2: pass\nprint(a + b)\n```"
    assert UnitTests(sandbox=box)(completions=[loop], tests=[pairs]) == [2 / 6] and len(runs) == 3
    runs.clear()
    off = "```python\na, b = map(int, input().split())\nprint(a + b + (a == 1))\n```"
    assert UnitTests(sandbox=box)(completions=[off], tests=[pairs[:3]]) == [2 / 3] and len(runs) == 3
    runs.clear()
    strict = UnitTests(sandbox=box, all_or_nothing=True)
    assert strict(completions=[off], tests=[pairs]) == [0.0] and len(runs) == 2


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


@pytest.mark.parametrize("text", [
    "`", "x```", "```x", "``` ", "> ", "``` x", " \t", "print ", "class", ". ", "- ", "x ```py ", "~~~\n"])
def test_no_completion_takes_long_to_read(text):
    """A line of 16,000 backticks took 14 s."""
    began = time.process_time()
    code_of("a" + text * (16_000 // len(text)))
    code_of("```" + text * (16_000 // len(text)) + "!")
    assert time.process_time() - began < 2
