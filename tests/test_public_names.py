"""The names that `realhf` exports: editors see the same ones as Python, and each is documented."""

import ast
import importlib
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import realhf

ROOT = Path(realhf.__file__).parent


def _documented(module: str) -> set[str]:
    """Return the names that a module defines with a docstring; an assignment's is the string below it."""
    body = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text()).body
    names = {
        node.name for node in body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node)
    }
    for node, below in pairwise(body):
        has_string = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if isinstance(node, ast.Assign) and has_string:
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def test_a_name_is_imported_when_it_is_used_first():
    code = "import sys, realhf; print('realhf.plan' in sys.modules, realhf.CallPlan.__module__)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out == "False realhf.plan\n"
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        realhf.Nothing  # noqa: B018


def test_type_checkers_see_the_names_that_are_imported_lazily():
    """They take `import X as X` for an export (PEP 484)."""
    tree = ast.parse(Path(realhf.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    lines = [f"from {module} import {name} as {name}" for name, module in realhf._MODULE_OF.items()]
    assert [ast.unparse(node) for node in block.body] == lines
    assert len(lines) > 60 and realhf.__all__ == sorted(realhf._MODULE_OF)


@pytest.mark.parametrize("name", realhf.__all__)
def test_public_names_exist_and_are_documented(name):
    module = realhf._MODULE_OF[name]
    assert getattr(realhf, name) is getattr(importlib.import_module(module), name)
    assert name in _documented(module.removeprefix("realhf."))
