"""The structure of the package: imports go strictly downward, light modules load no torch."""

import ast
import builtins
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "realhf"

NOUNS = ("cluster", "execution_plan", "graph", "layout", "models")
LAYERS = {
    **dict.fromkeys(("errors", "signals"), 0),
    "user_input": 0.5,
    "job_process": 0.6,
    **dict.fromkeys(NOUNS, 1),
    "devices": 1.5,
    **dict.fromkeys(("distributed", "data"), 2),
    "realloc": 2.5,
    "calls": 2.7,
    "attention": 2.9,
    **dict.fromkeys(("nn", "planner"), 3),
    **dict.fromkeys(("checkpoint", "inference"), 3.5),
    "engine": 4,
    "steps": 4.5,
    "experiment": 5,
    **dict.fromkeys(("algorithms", "environments", "rewards", "runtime", "scaling"), 6),
    **dict.fromkeys(("profiling", "report"), 6.5),
    **dict.fromkeys(("cli", "__main__"), 7),
    "python": 8,
}
"""Layer of every module or subpackage directly under realhf."""
RUNTIME_LAYERS = {
    "compile": 0, "doubts": 0.5, "records": 0.8, **dict.fromkeys(("samples", "weights"), 1), "execute": 2}
"""The same of the subpackages of realhf.runtime, whose own modules, such as the trainer, are above them."""
SIDEWAYS = {("nouns", "nouns"), ("algorithms", "rewards"), ("environments", "rewards")}
SIDEWAYS |= {("__main__", "cli"), ("algorithms", "environments")}
FORBIDDEN = [
    *(("realhf.runtime", f"realhf.planner.{name}") for name in (
        "candidates", "call_group", "memory_bounds", "search_space", "search", "reasons", "make",
        "comparisons", "report")),
    ("realhf.runtime", "realhf.algorithms"),
    ("realhf.inference", "realhf.planner"), ("realhf.nn", "realhf.realloc"),
]
TORCH_FREE = [f"realhf.{noun}" for noun in NOUNS] + [
    *("realhf", "realhf.calls", "realhf.experiment", "realhf.algorithms", "realhf.rewards", "realhf.planner"),
    "realhf.environments", "realhf.scaling",
    *("realhf.data.dataset", "realhf.data.tokenized", "realhf.data.light_tokenizer"),
    *("realhf.data.micro_batch", "realhf.devices.chunk_sizes"),
    "realhf.user_input",
    *("realhf.engine.hf_factory", "realhf.steps"),
    "realhf.job_process",
    *(f"realhf.runtime.compile.{name}" for name in ("program", "step_trial")),
    "realhf.runtime.doubts",
    *(f"realhf.runtime.records.{name}" for name in ("rollout_file", "run_directory", "trackers")),
    *(f"realhf.cli.{name}" for name in ("main", "run", "check", "plan", "profile", "realloc", "scaling")),
    *(f"realhf.cli.{name}" for name in ("planning_problem", "program", "init", "eval", "launch", "rollouts")),
    "realhf.report", "realhf.cli.report",
    "realhf.signals", "realhf.python",
]
"""Modules, or packages with all that is in them, from which imports never lead to torch."""


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text())
    return found


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports(node: ast.AST, *, functions: bool, type_checking: bool) -> list[str]:
    """Dotted names that the code imports; those inside functions and for type checkers only on demand."""
    names = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            names += [alias.name for alias in child.names]
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"relative import in line {child.lineno}"
            for alias in child.names:
                full = f"{child.module}.{alias.name}"
                names.append(full if full in modules() else str(child.module))
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if (functions or not is_function) and (type_checking or not _is_type_checking(child)):
            names += imports(child, functions=functions, type_checking=type_checking)
    return names


def part(module: str, *, depth: int = 1) -> str:
    """The module or subpackage that a module belongs to, directly under realhf or one of its packages."""
    return module.split(".")[depth]


def is_internal(name: str) -> bool:
    return name.split(".")[0] == "realhf"


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".") and package != "realhf"


def test_imports_go_strictly_downward():
    wrong = []
    for module, tree in modules().items():
        for name in imports(tree, functions=True, type_checking=module != "realhf"):
            if not is_internal(name):
                continue
            if module == "realhf" or name == "realhf":
                wrong.append(f"{module} imports {name}: realhf itself neither imports nor is imported")
                continue
            here, there = part(module), part(name)
            pair = ("nouns", "nouns") if here in NOUNS and there in NOUNS else (here, there)
            assert here in LAYERS and there in LAYERS, f"{module} or {name} has no layer: add it to LAYERS"
            if here != there and pair not in SIDEWAYS and LAYERS[there] >= LAYERS[here]:
                wrong.append(f"{module} (layer {LAYERS[here]}) imports {name} (layer {LAYERS[there]})")
            for source, target in FORBIDDEN:
                if within(module, source) and within(name, target):
                    wrong.append(f"{module} imports {name}")
    assert wrong == []


def test_subpackages_are_layered_too():
    package, layers = "realhf.runtime", RUNTIME_LAYERS
    wrong, top = [], 1 + max(layers.values())
    for module, tree in modules().items():
        for name in imports(tree, functions=True, type_checking=True):
            if within(module, package) and within(name, package):
                here, there = (layers.get(part(one, depth=2), top) for one in (module, name))
                if part(module, depth=2) != part(name, depth=2) and there >= here != top:
                    wrong.append(f"{module} imports {name}")
    assert wrong == []


def test_modules_of_the_planner_are_in_the_order_of_its_map():
    """The map is the docstring of the package: an indented line for each module begins with its name."""
    names = re.findall(r"(?m)^    (\w+) ", ast.get_docstring(modules()["realhf.planner"]) or "")
    order = [f"realhf.planner.{name}" for name in names]
    assert sorted([*order, "realhf.planner"]) == [one for one in modules() if within(one, "realhf.planner")]
    wrong = []
    for position, module in enumerate(order):
        for name in imports(modules()[module], functions=True, type_checking=True):
            if within(name, "realhf.planner") and name not in order[:position]:
                wrong.append(f"{module} imports {name}")
    assert wrong == []


def test_no_code_outside_algorithms_names_an_algorithm():
    """Exceptions: names in `realhf/__init__.py`, `realhf import`, and Evaluate, which learns nothing."""
    bases = {
        node.name: {ast.unparse(base) for base in node.bases}
        for module, tree in modules().items() if within(module, "realhf.algorithms")
        for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    algorithms: set[str] = set()
    while more := {name for name in bases if bases[name] & {"Experiment", *algorithms}} - algorithms:
        algorithms |= more
    algorithms.remove("Evaluate")
    assert {"GRPO", "PPO", "SFT", "DPO", "OnPolicy"} <= algorithms
    named = {
        module: {getattr(node, "id", getattr(node, "name", "")) for node in ast.walk(tree)
                 if isinstance(node, ast.Name | ast.alias)}
        for module, tree in modules().items()
        if not module.startswith(("realhf.cli.import_trl", "realhf.cli.import_verl"))
        and module != "realhf" and not within(module, "realhf.algorithms")}
    assert {module: names & algorithms for module, names in named.items() if names & algorithms} == {}


def test_every_module_has_a_layer():
    assert [module for module in modules() if module != "realhf" and part(module) not in LAYERS] == []


def named_imports(module: ast.Module) -> list[str]:
    """Dotted names that the code passes to import_module."""
    calls = [node for node in ast.walk(module) if isinstance(node, ast.Call)]
    found = [node.args[0] for node in calls if ast.unparse(node.func).endswith("import_module")]
    return [name.value for name in found if isinstance(name, ast.Constant)]


def test_no_import_cycles():
    """Imports inside functions count, too. The package realhf imports its names on their first use."""
    graph = {}
    for module, tree in modules().items():
        names = imports(tree, functions=True, type_checking=False)
        graph[module] = {name for name in names if name in modules() and name != "realhf"} - {module}
    while graph:
        leaves = {module for module, targets in graph.items() if not targets & graph.keys()}
        assert leaves, f"import cycle among {sorted(graph)}"
        graph = {module: targets for module, targets in graph.items() if module not in leaves}


def test_modules_of_the_package_are_imported_by_statements():
    """Editors and type checkers follow them. The exception is the package itself, whose names load late."""
    named = {module: [name for name in named_imports(tree) if is_internal(name) and name != "realhf"]
             for module, tree in modules().items()}
    assert {module: names for module, names in named.items() if names} == {}


LATE = ("torch", "scipy", "matplotlib", "plotly", "triton", "megatron")
"""Libraries that are slow to import or may be missing."""


def test_no_globals_star_imports_or_needless_imports_inside_functions():
    """A function imports a module of the package only if that loads a library which its own file does not.

    `realhf.__main__` imports nothing before it has taken the signals.
    """
    wrong = []
    for module, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Global):
                wrong.append(f"{module}:{node.lineno} global {', '.join(node.names)}")
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                wrong.append(f"{module}:{node.lineno} star import")
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                hidden = [n for n in imports(node, functions=True, type_checking=True) if is_internal(n)]
                wrong += [
                    f"{module}:{node.lineno} {node.name} imports {name} inside" for name in hidden
                    if module != "realhf.__main__"
                    and not any(import_path(name, to) and not import_path(module, to) for to in LATE)]
    assert wrong == []


@cache
def imports_at_first(module: str) -> list[str]:
    """Dotted names that the module imports when it is imported itself."""
    return imports(modules()[module], functions=False, type_checking=False)


def import_path(module: str, library: str, seen: set[str] | None = None) -> list[str] | None:
    """How importing the module leads to the library, if it does."""
    seen = set() if seen is None else seen
    seen.add(module)
    for name in imports_at_first(module):
        if name.split(".")[0] == library:
            return [module, name]
        pieces = name.split(".")
        for target in (".".join(pieces[:i]) for i in range(1, len(pieces) + 1)):
            if target in modules() and target not in seen and (path := import_path(target, library, seen)):
                return [module, *path]
    return None


@pytest.mark.parametrize("package", TORCH_FREE)
def test_light_modules_do_not_import_torch(package):
    assert package in modules()
    paths = [import_path(module, "torch") for module in modules() if within(module, package)]
    assert [" -> ".join(path) for path in paths if path] == []


def test_command_line_does_not_import_torch_itself():
    for module, tree in modules().items():
        if within(module, "realhf.cli.main") or module == "realhf.__main__":
            tops = {name.split(".")[0] for name in imports(tree, functions=False, type_checking=False)}
            assert "torch" not in tops, module


def test_import_and_help_leave_torch_alone():
    commands = [["-c", "import realhf"]]
    if "realhf.__main__" in modules():
        commands.append(["-m", "realhf", "--help"])
    for command in commands:
        result = subprocess.run(
            [sys.executable, "-X", "importtime", *command], cwd=ROOT, capture_output=True, text=True
        )
        imported = [line.split("|")[-1].strip() for line in result.stderr.splitlines()]
        assert result.returncode == 0, result.stderr
        assert "realhf" in imported and "torch" not in imported


def test_a_name_of_a_type_has_one_meaning():
    """This holds for classes, private ones too, and for other names of types, which may be defined twice if
    the definitions are equal."""
    meanings = defaultdict(set)
    for module, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                meanings[node.name].add(f"class in {module}")
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                if name[0].isupper() and not name.isupper():
                    meanings[name].add(ast.unparse(node.value))
    assert {name: sorted(where) for name, where in meanings.items() if len(where) > 1} == {}


# Words in docstrings and comments

FROM_ELSEWHERE = {
    "__pycache__", "_name_or_path", "get_megatron_optimizer", "ps", "sha256sum", "e2", "d2", "teacher_1",
    "teacher_2"}
"""Names in docstrings that are no names of this package: commands, other libraries' and users' names."""


def test_names_in_docstrings_and_comments_exist():
    """A name in backticks is one of the source, and a file that is named is there."""
    known = {*dir(builtins), *FROM_ELSEWHERE}
    files = {path.name for path in ROOT.rglob("*.py") if ".venv" not in path.parts}
    files |= {"rewards.py", "file.py"}  # A user's.
    prose = []
    for path in sorted(PACKAGE.rglob("*.py")):
        known |= {*path.relative_to(PACKAGE).parts, path.stem}
        with tokenize.open(path) as source:
            tokens = list(tokenize.generate_tokens(source.readline))
        is_alone = True  # A string that is a statement of its own is a docstring.
        for token in tokens:
            if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and is_alone):
                prose.append((f"{path.relative_to(ROOT)}:{token.start[0]}", token.string))
            elif token.type in (tokenize.NAME, tokenize.STRING):
                known |= set(re.findall(r"[A-Za-z_]\w*", token.string))
            if token.type not in (tokenize.COMMENT, tokenize.NL):
                is_alone = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    stale = [
        f"{place}: {name}" for place, text in prose
        for name in re.findall(r"`([A-Za-z_][\w.]*)(?:\(\))?`", text)
        if any(word not in known and not word.isdigit() for word in name.split("."))]
    stale += [
        f"{place}: {name}" for place, text in prose for name in re.findall(r"\b\w+\.py\b", text)
        if name not in files]
    assert len(prose) > 3000 and stale == []
