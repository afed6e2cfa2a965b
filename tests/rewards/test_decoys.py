"""Decoys: right programs fail them, and programs that deceive a test pass them."""

import ast
import gc
import platform
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from realhf import Sandbox, UnitTests
from realhf.rewards.unit_tests import decoy

pytestmark = pytest.mark.skipif(platform.system() != "Linux", reason="the sandbox needs Linux")
RIGHT = {
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
}  # fmt: skip
"""Code that passes a test."""


def test_right_programs_pass_tests_and_fail_decoys():
    codes, tests = zip(*RIGHT.values(), strict=True)
    extra = {}
    scores = UnitTests()(completions=list(codes), tests=list(tests), log_extra=extra.__setitem__)
    assert dict(zip(RIGHT, extra["unit_tests/reason"], strict=True)) == dict.fromkeys(RIGHT, "passed")
    assert scores == [1.0] * len(RIGHT)


def test_decoys_differ_from_their_tests_in_what_they_expect():
    for code, test in RIGHT.values():
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
