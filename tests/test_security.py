"""What docs/security.md claims about the package's code, and messages of a size that nobody can mean."""

import ast
import functools
from pathlib import Path

import pytest

from realhf.distributed.group import MAX_MESSAGE_BYTES, checked_length

PACKAGE = Path(__file__).parent.parent / "realhf"
RUNS_CODE = ("eval", "exec", "compile", "__import__")
UNPICKLES = ("pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve")
OBJECTS = (
    "send_object_list", "recv_object_list", "broadcast_object_list", "all_gather_object", "gather_object",
    "scatter_object_list",
)


@functools.cache
def modules() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def calls():
    """Yield file, dotted name and node of every call in the package."""
    for path, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield path.relative_to(PACKAGE), ast.unparse(node.func), node


def test_nothing_unpickles_or_runs_text():
    refused = (*RUNS_CODE, "torch.load", "os.system", "np.load", "numpy.load")
    wrong = [(str(path), name) for path, name, _ in calls()
             if name in refused or name.split(".")[-1] in OBJECTS]
    runner = "rewards/sandbox_runner.py"  # It runs in a process that it has confined before.
    assert sorted(wrong) == [(runner, "compile"), (runner, "exec")]
    nodes = [node for path, tree in modules().items() for node in ast.walk(tree)
             if path.relative_to(PACKAGE) != Path("python.py")]
    imported = {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    assert {name.split(".")[0] for name in imported} & set(UNPICKLES) == set()
    assert not any("sandbox_runner" in name for name in imported)
    of_python = [name for path, name, _ in calls() if path == Path("python.py")]
    of_pickles = [name for name in of_python if name.startswith("cloudpickle")]
    assert of_pickles == ["cloudpickle.dumps"]  # Only the experiment's own file, which is code, reads it.


OWN = (
    "cli/init.py",  # Files of the package itself.
    # Files of the kernel.
    "cli/plan.py", "cluster.py", "inference/cache_memory.py", "profiling/clock.py",
    "runtime/execute/meters.py", "devices/half_precision.py",
    "rewards/confinement.py", "rewards/sandbox.py", "rewards/sandbox_folder.py", "rewards/sandbox_runner.py",
    "distributed/world.py", "distributed/communicators.py",  # Memory and ports of the same run.
)


def _opens_for_reading(name: str, node: ast.Call) -> bool:
    """Return whether a call opens a file to read it, other than through realhf.user_input.files."""
    owner, _, last = name.rpartition(".")
    if last in ("read_text", "read_bytes", "from_file"):
        return bool(owner)
    if last != "open" or name == "os.open":
        return False
    texts = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    return not any(set(text) & set("wax+") and len(text) <= 3 for text in texts)


def test_files_are_opened_in_one_place():
    """Only this module checks that a file is a regular one: another reader would wait for a FIFO."""
    found = {str(path) for path, name, node in calls() if _opens_for_reading(name, node)}
    assert found <= {*OWN, "user_input/files.py"}, found


def test_yaml_is_read_by_a_safe_loader():
    loads = [(str(path), ast.unparse(node)) for path, name, node in calls()
             if name.startswith("yaml.") and "load" in name]
    assert loads == [("user_input/shipped.py", "yaml.load(text, _Loader)")]
    (loader,) = (node for node in ast.walk(modules()[PACKAGE / "user_input/shipped.py"])
                 if isinstance(node, ast.ClassDef) and node.name == "_Loader")
    assert [ast.unparse(base) for base in loader.bases] == ["yaml.SafeLoader"]


def test_files_run_only_as_the_experiment():
    """Only the experiment is executed, for its environments, too, and the file that `realhf eval --reward`
    names."""
    runs = {str(path) for path, name, _ in calls() if name.endswith("exec_module")}
    assert runs == {"user_input/files.py"}
    users = [str(path) for path, name, _ in calls() if name == "execute_file"]
    assert sorted(users) == ["cli/eval.py", "cli/experiment_file.py", "environments/worker_host.py"]


def test_transformers_never_loads_code_or_asks_the_network():
    how = "how = {'local_files_only': True, 'use_safetensors': True, 'trust_remote_code': False}"
    assert how in ast.unparse(modules()[PACKAGE / "engine/hf_factory.py"])
    found = {}
    for path, name, node in calls():
        if name.split(".")[-1] in ("from_pretrained", "from_config"):
            text = ast.unparse(node)
            assert "trust_remote_code=False" in text or "**how" in text, (path, text)
            assert "from_config" in name or "local_files_only=True" in text or "**how" in text, (path, text)
            found[str(path), name] = text
    assert len(found) == 5


@pytest.mark.parametrize("length", [-1, MAX_MESSAGE_BYTES + 1, 2**62])
def test_sizes_that_no_message_has_are_refused_before_memory_is_allocated(length):
    with pytest.raises(RuntimeError, match=f"rank 3 announces a message of {length} bytes"):
        checked_length(length, rank=3)
    assert checked_length(0, rank=3) == 0
