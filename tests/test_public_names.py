"""The names that `realhf` exports: editors see the same ones as Python, and each is documented."""

import ast
import importlib
import inspect
import subprocess
import sys
import textwrap
from itertools import pairwise
from pathlib import Path
from typing import Any

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
    code = "import sys, realhf; print('realhf.execution_plan' in sys.modules, realhf.CallPlan.__module__)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out == "False realhf.execution_plan\n"
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


FROZEN = {
    "Batch": {
        "ids": "list[int]", "fields": "dict[str, Any]", "__len__": "(self) -> int",
        "__getitem__": "(self, key: str) -> Any", "select": "(self, indices: Sequence[int]) -> 'Batch'",
        "pick": "(self, keys: Sequence[str]) -> 'Batch'"},
    "Packed": {
        "values": "torch.Tensor", "lengths": "list[int]", "__len__": "(self) -> int",
        "split": "(self) -> tuple[torch.Tensor, ...]", "like": "(self, values: torch.Tensor) -> 'Packed'",
        "select": "(self, indices: Sequence[int]) -> 'Packed'",
        "of": "(sequences: Sequence[torch.Tensor], *, empty: torch.Tensor | None = None) -> 'Packed'"},
    "Loss": {
        "output": "str", "entropy": "bool", "learns": "str", "group_size": "int",
        "token_ids": "tuple[str, ...]",
        "totals": "(self, batch: Batch) -> dict[str, float]",
        "__call__": "(self, outputs: Mapping[str, Tensor], batch: Batch, totals: Mapping[str, float]) "
                    "-> tuple[Tensor, dict[str, Tensor]]",
        "summarize": "(self, means: Mapping[str, float], first: Mapping[str, float]) -> Mapping[str, float]",
        "row_fault": "(self, row: Mapping[str, Any]) -> str | None"},
    "StepEvent": {
        "step": "int", "steps": "int", "metrics": "Mapping[str, float]", "out": "Path | None",
        "evaluations": "Mapping[int, Mapping[str, float]]", "values": "Mapping[str, float]",
        "checkpoint": "Path | None", "stop": "(self, reason: str = 'a hook') -> None",
        "set": "(self, name: str, value: float) -> None"},
}
"""What users write losses, data and hooks against: it may gain members, and not lose or change any."""
FUNCTIONS = {
    "pair_indices": "(batch: Batch) -> tuple[list[int], list[int]]",
    "num_pairs": "(batch: Batch) -> int",
    "split_pairs": "(values_S: Tensor, batch: Batch) -> tuple[Tensor, Tensor]",
    "check": "(experiment: Experiment | str | Path, *, nproc: int | None = None, "
             "plan: ExecutionPlan | str | Path | None = None, cluster: str | Path | None = None, "
             "**options: Any) -> Checked",
    "load": "(directory: str | Path) -> TrainingRun",
    "plan": "(experiment: Experiment | str | Path, **options: Any) -> ExecutionPlan",
    "run": "(experiment: Experiment | str | Path, *, nproc: int | None = None, "
           "plan: ExecutionPlan | str | Path | None = None, out: str | Path | None = None, "
           "resume: bool | str | Path = False, **options: Any) -> TrainingRun",
    "evaluate": "(what: Experiment | TrainingRun | str | Path, *, data: Any = None, "
                "out: str | Path | None = None, **options: Any) -> Evaluated",
}


def _signature(function: Any) -> str:
    """Return a signature as it is written, whether or not annotations are evaluated."""
    node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(node, ast.FunctionDef)
    arguments = ast.unparse(node.args).removeprefix("cls, ")
    return f"({arguments}) -> {ast.unparse(node.returns)}"


@pytest.mark.parametrize("name", FROZEN)
def test_what_own_code_is_written_against_stays_as_it_is(name):
    kind = getattr(realhf, name)
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    annotated = [node for node in tree.body if isinstance(node, ast.AnnAssign)]
    fields = {node.target.id: ast.unparse(node.annotation) for node in annotated}
    for member, written in FROZEN[name].items():
        if written.startswith("("):
            assert _signature(getattr(kind, member)) == _written(written), member
        else:
            assert fields[member] == written


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_stay_as_they_are(name):
    assert _signature(getattr(realhf, name)) == _written(FUNCTIONS[name])


def _written(text: str) -> str:
    node = ast.parse(f"def f{text}: ...").body[0]
    assert isinstance(node, ast.FunctionDef)
    return f"({ast.unparse(node.args)}) -> {ast.unparse(node.returns)}"
