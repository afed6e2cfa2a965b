"""The names that `realhf` exports: editors see the same ones as Python, and each is documented."""

import ast
import importlib
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


def test_type_checkers_see_the_names_that_are_imported_lazily():
    tree = ast.parse(Path(realhf.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert len(imports) == len(block.body)
    found = {str(node.module).removeprefix("realhf."): [a.name for a in node.names] for node in imports}
    assert found == {module: list(names) for module, names in realhf._PUBLIC.items()}
    assert sorted(realhf.__all__) == sorted(name for names in found.values() for name in names)


@pytest.mark.parametrize("module", realhf._PUBLIC)
def test_public_names_exist_and_are_documented(module):
    loaded = importlib.import_module(f"realhf.{module}")
    for name in realhf._PUBLIC[module]:
        assert getattr(realhf, name) is getattr(loaded, name)
        assert name in _documented(module)
