"""UnitTests: code of a completion against the tests of its row.

Right programs fail decoys, and programs that deceive a test pass them.
"""

import ast
import gc
import platform
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from realhf import Sandbox, UnitTests
from realhf.errors import UserError
from realhf.rewards.reward import reward_columns
from realhf.rewards.unit_tests import code_of, decoy

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


@pytest.mark.slow
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


PASSING = {
    "an assertion": ("def f(a): return a * 2", "assert f(2) == 4"),
    "the value first": ("def f(a): return a * 2", "assert 4 == f(2), 'twice'"),
    "several": ("def f(a): return a * 2", "assert f(2) == 4\nassert f('x') == 'xx'\nassert f([1]) == [1, 1]"),
    "a check": (
        "def f(a): return not a", "def check(c):\n    assert c(1) == False\n    assert c(0)\ncheck(f)"),
    "a check that nobody calls": ("def f(a): return a", "def check(c):\n    assert c(1) == 2"),
    "a check that returns": (
        "def f(a): return a", "def check(c):\n    if c(1): return\n    assert c(1) == 2\ncheck(f)"),
    "in a branch": ("x = 1", "if x == 2:\n    assert x == 1"),
    "a comparison of three": ("def f(a): return a", "assert 1 == f(1) == 1"),
    "nearly equal": ("def f(a): return a / 3", "assert abs(f(1) - 0.3333) < 1e-3"),
    "nearly equal to a negative number": ("def f(a): return a / -3", "assert abs(-0.3333 - f(1)) <= 100"),
    "close": ("import math\ndef f(a): return a / 3", "assert math.isclose(f(1), 0.3333, rel_tol=0.4)"),
    "close by another module": (
        "from math import isclose\ndef f(a): return a / 3", "assert isclose(1 / 3, f(1))"),
    "smaller": ("def f(a): return a", "assert f(1) < 3"),
    "a set": ("def f(a): return set(a)", "assert f('ab') == {'a', 'b'}"),
    "a dictionary": ("def f(a): return dict.fromkeys(a, [])", "assert f('ab') == {'a': [], 'b': []}"),
    "nothing": ("def f(a): return None", "assert f(1) == None\nassert f(1) is None"),
    "a tuple with a name": (
        "import collections\nT = collections.namedtuple('T', 'a b')\ndef f(a): return T(a, a)",
        "assert f(1) == (1, 1)"),
    "objects": (
        "class P:\n    def __init__(self, x): self.x = x\n    def __eq__(self, o): return self.x == o.x",
        "assert P(1) == P(1)\nassert P(1) != P(2)"),
    "a state": ("n = [0]\ndef f():\n    n[0] += 1\n    return n[0]", "assert f() == 1\nassert f() == 2"),
    "no assertion": ("x = 1", "x"),
    "an infinite number": ("x = 1e999", "assert x == 1e999\nassert x == float('inf')"),
    "a large number": ("x = 1e300", "assert x == 1e300"),
    "a long expression": ("x = 1", f"y = {'+'.join(['1'] * 900)}\nassert x == 1"),
    "a long number": (f"x = {'9' * 4300}", f"assert x == {'9' * 4300}"),
    "nearly a long number": (f"x = {'9' * 400}", f"assert abs(x - {'9' * 400}) < 0.5"),
    "a check that is defined again": (
        "def f(a): return a",
        "def check(c):\n    assert c(1) == 2\ndef check(c):\n    assert c(1) == 1\ncheck(f)"),
    "a check that is defined again, later": (
        "def f(a): return a",
        "def check(c):\n    assert c(1) == 1\ncheck(f)\ndef check(c):\n    assert c(1) == 2"),
    "a check that is replaced": (
        "def f(a): return a", "def check(c):\n    assert c(1) == 2\ncheck = f\ncheck(f)"),
    "a check that is imported": (
        "def f(a): return a", "def check(c):\n    assert c(1) == 2\nfrom math import sin as check\ncheck(1)"),
    "a check that is wrapped": (
        "def f(a): return a", "@lambda c: print\ndef check(c):\n    assert c(1) == 2\ncheck(f)"),
}
"""Programs that pass a test."""


def test_right_programs_pass_tests_and_fail_decoys():
    codes, tests = zip(*PASSING.values(), strict=True)
    extra = {}
    scores = UnitTests()(completions=list(codes), tests=list(tests), log_extra=extra.__setitem__)
    assert dict(zip(PASSING, extra["unit_tests/reason"], strict=True)) == dict.fromkeys(PASSING, "passed")
    assert scores == [1.0] * len(PASSING)


def test_decoys_differ_from_their_tests_in_what_they_expect():
    for code, test in PASSING.values():
        names = {}
        exec(f"{code}\n{test}", names)
        for _ in range(5):
            assert ast.dump(ast.parse(decoy(test))) != ast.dump(ast.parse(test))
            with pytest.raises((AssertionError, NameError)):  # inf is a name.
                exec(f"{code}\n{decoy(test)}", {})
    assert {decoy("assert f(2) == [1, {2: 'a'}]") for _ in range(5)} == {"assert f(2) == [1, {2: 'as'}]"}
    assert decoy("assert abs(f(2) - 3) < 1") == "assert abs(f(2) - 20) < 1"
    assert {decoy("assert f() == 1\nassert f() == 2") for _ in range(99)} == {
        "assert f() == 2\nassert f() == 2", "assert f() == 1\nassert f() == 3"}


@pytest.mark.slow
def test_threads_that_parse_at_once_all_get_a_decoy():
    """A collection of garbage lets another thread go on in the middle of a syntax tree."""
    test = f"x = {'+'.join(['1'] * 300)}\nassert f(1) == 1"
    threshold = gc.get_threshold()
    gc.callbacks.append(_let_others_go_on)
    gc.set_threshold(20)
    try:
        with ThreadPoolExecutor(8) as pool:
            decoys = list(pool.map(decoy, [test] * 200))
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(_let_others_go_on)
    assert {other.rpartition("assert ")[2] for other in decoys} == {"f(1) == 2"}


def _let_others_go_on(phase, info):
    time.sleep(0.0001)


def test_code_that_passes_a_decoy_has_deceived_all_tests_that_it_passes():
    code = "class E:\n    def __eq__(self, other): return True\ndef f(a): return E()"
    extra = {}
    tests = [["assert f(1) == 1", "assert f(1) == 2", "undefined"]]
    scores = UnitTests()(completions=[code], tests=tests, log_extra=extra.__setitem__)
    assert scores == [0.0] and extra == {"unit_tests/reason": ["deceived"]}
    assert Sandbox().run(code, tests[0]).tests == ("passed", "passed", "error")
