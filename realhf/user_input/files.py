"""Reads files that others may have written, and executes the user's own. Imports no torch.

Only regular files of a bounded size are read: a FIFO or a device would make a reader wait for ever, or give
it bytes without end.
"""

import ast
import errno
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import lru_cache, partial
from importlib.machinery import ModuleSpec
from io import BufferedReader
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from realhf.errors import UserError, is_users_file
from realhf.user_input.units import format_bytes

MAX_SETTINGS_BYTES = 16 << 20
"""Most bytes of a file of settings, such as config.json."""
MAX_TABLE_BYTES = 256 << 20
"""Most bytes of a JSON file with long tables: a tokenizer.json or a manifest."""
MAX_ROW_BYTES = 4_000_000
"""Most bytes of a row of a data set, and of its chat: a million tokens have about as many."""
MAX_LINE_BYTES = 16 << 20
"""Most bytes of a line of another file with one JSON object per line."""
_LFS_POINTER = b"version https://git-lfs.github.com/"
_MAX_CONTAINERS = 8_000_000
_MAX_COMMAS = 20_000_000
"""Most lists and objects of a JSON text, and most commas: each takes many times its bytes of memory."""
_MAX_DIGITS = 300
"""Most digits of a whole number in a settings file: every number is then a finite float, too."""
_KINDS = {
    stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a symbolic link",
}


def open_regular(path: str | Path, *, follow: bool = True) -> BufferedReader:
    """Open a file for reading. Raises OSError at once if it is no regular file.

    Without `follow`, a symbolic link is refused, too.
    """
    _require_regular(os.stat(path, follow_symlinks=follow), path)
    more = 0 if follow else os.O_NOFOLLOW
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | more)
    try:
        _require_regular(os.fstat(descriptor), path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _require_regular(status: os.stat_result, path: str | Path) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "of another kind")
        raise OSError(errno.EINVAL, f"it is {kind}, and must be a regular file", str(path))


def require_regular_files(directory: Path, *, most: int = MAX_TABLE_BYTES) -> None:
    """Raise UserError unless all small files of a directory are regular ones of at most `most` bytes.

    Other libraries read such a directory, and would wait for a FIFO. Weights may be larger.
    """
    try:
        paths = sorted(directory.iterdir()) if directory.is_dir() else []
    except OSError as error:
        raise UserError(f"{directory} cannot be read: {error.strerror}") from error
    for path in paths:
        if path.is_dir():
            continue
        try:
            _require_regular(os.stat(path), path)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from error
        size = path.stat().st_size
        if path.suffix in (".json", ".jinja", ".txt", ".model") and size > most:
            raise UserError(f"{path} cannot be read: {_too_large(size, most)}")


def read_bytes(path: str | Path, *, most: int, follow: bool = True) -> bytes:
    """Return the content of a regular file. Raises OSError, also if it has more than `most` bytes."""
    with open_regular(path, follow=follow) as file:
        size = os.fstat(file.fileno()).st_size
        data = b"" if size > most else file.read(most + 1)
    if size > most or len(data) > most:
        raise OSError(errno.EFBIG, _too_large(max(size, len(data)), most), str(path))
    return data


def _too_large(size: int, most: int) -> str:
    return f"it has {format_bytes(size)}, and at most {format_bytes(most)} are read"


def read_text(path: str | Path, *, most: int = MAX_SETTINGS_BYTES, what: str = "") -> str:
    """Return the text of a regular file in UTF-8.

    Raises UserError that begins with `what` and names the file.
    """
    name = f"{what} {path}".strip()
    try:
        return read_bytes(path, most=most).decode()
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def read_json(path: str | Path, *, most: int = MAX_SETTINGS_BYTES, what: str = "") -> Any:
    """Return the value in a JSON file. Raises UserError that begins with `what` and names the file."""
    return parse_json(read_text(path, most=most, what=what), f"{what} {path}".strip())


def read_object(path: str | Path, *, most: int = MAX_SETTINGS_BYTES, what: str = "") -> dict[str, Any]:
    """Return the object in a JSON file. Raises UserError that begins with `what` and names the file."""
    value = read_json(path, most=most, what=what)
    if not isinstance(value, dict):
        raise UserError(f"{what} {path} is not a JSON object".lstrip())
    return value


def refuse_lfs_pointer(beginning: bytes, where: str) -> None:
    """Raise UserError that begins with `where` if a file is what a clone without Git LFS has in its place."""
    if beginning.startswith(_LFS_POINTER):
        raise UserError(f"{where} is a pointer of Git LFS instead of the file itself: run `git lfs pull`")


def parse_json(text: str | bytes, where: str) -> Any:
    """Return the value of a JSON text. Raises UserError that begins with `where`."""
    refuse_lfs_pointer(text[:64].encode(errors="replace") if isinstance(text, str) else text, where)
    try:
        text = text if isinstance(text, str) else text.decode()
        if text.count("[") + text.count("{") > _MAX_CONTAINERS or text.count(",") > _MAX_COMMAS:
            most = f"at most {_MAX_CONTAINERS:,} lists and objects with {_MAX_COMMAS:,} commas are read"
            raise UserError(f"{where} has too many parts: {most}")
        return json.loads(text, parse_int=_whole_number, object_pairs_hook=unique_keys)
    except UserError:
        raise
    except RepeatedKeyError as error:
        raise UserError(f"{where} has an object that has {error}") from error
    except RecursionError as error:
        raise UserError(f"{where} is nested too deeply") from error
    except ValueError as error:
        raise UserError(f"{where} is not JSON: {error}") from error


class RepeatedKeyError(Exception):
    """An object of JSON has a key twice with different values, of which a parser would keep the last."""


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON. Raises RepeatedKeyError if a key has two values."""
    made = dict(pairs)
    if len(made) < len(pairs) and (other := [key for key, value in pairs if made[key] != value]):
        raise RepeatedKeyError(f"{other[0]!r} twice: keep one")
    return made


def _whole_number(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"it has a whole number of {len(digits)} digits, and at most {_MAX_DIGITS} are read")
    return int(digits)


def read_lines(
    path: str | Path, *, most: int = MAX_LINE_BYTES, follow: bool = True
) -> Iterator[bytes]:
    """Yield the lines of a regular file with their ends.

    Raises OSError, also about a line of more than `most` bytes.
    """
    with open_regular(path, follow=follow) as file:
        number = 0
        while line := file.readline(most + 1):
            number += 1
            if len(line) > most:
                raise OSError(errno.EFBIG, f"line {number} has more than {format_bytes(most)}", str(path))
            yield line


def read_json_lines(path: str | Path, *, follow: bool = True) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the object of each line, without a last line that has no end yet.

    Raises UserError that names the file and the line.
    """
    try:
        for number, line in enumerate(read_lines(path, follow=follow), start=1):
            if line.endswith(b"\n") and line.strip():
                where = f"{path} line {number}"
                row = parse_json(line.decode(errors="replace"), where)
                if not isinstance(row, dict):
                    raise UserError(f"{where} is {type(row).__name__}: every line must be an object")
                yield number, row
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def require_output(path: Path, option: str, *, first: str, what: str) -> None:
    """Raise UserError if no file can be written here, or if one of another kind exists, and would be lost.

    A file of the right kind begins with the field `first`, behind any comments.
    """
    if not path.parent.is_dir():
        raise UserError(f"{option} {path}: there is no directory {path.parent}")
    if path.is_dir():
        raise UserError(f"{option} {path} is a directory: name the file to write")
    if not path.exists():
        return
    try:
        lines = read_bytes(path, most=MAX_TABLE_BYTES).decode(errors="replace").splitlines()
    except OSError as error:
        raise UserError(f"{option} {path} exists and is no {what}: {error.strerror}") from error
    fields = [line for line in lines if line.strip() and not line.startswith(("#", "---"))]
    if fields and not fields[0].startswith(first):
        raise UserError(f"{option} {path} exists and is no {what}: name another file")


def prepare_once(path: str | Path, make: Callable[[Path], object]) -> Path:
    """Return `path`, after `make` has written it if it did not exist.

    The launcher and every worker execute an experiment file at the same time. One of the processes that call
    this for the same path, on one host or on hosts with a common file system, calls `make(temporary_path)`,
    which writes a file or a directory there; the others wait. The result gets its name only when it is
    complete, so that a `make` that fails leaves nothing behind.
    """
    path = Path(path)
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / f".{path.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return path
        scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        try:
            result = scratch / path.name
            make(result)
            if not result.exists():
                name = getattr(make, "__qualname__", type(make).__name__)
                raise ValueError(f"prepare_once: {name} wrote nothing at {result}, the path that it got")
            os.rename(result, path)
        finally:
            shutil.rmtree(scratch)
    return path


class _SourceLoader(importlib.machinery.SourceFileLoader):
    """A loader that compiles the source anew.

    Python trusts a compiled copy (`__pycache__`) if the source's size and its time in whole seconds are those
    of when it was compiled: an edit of equal length within a second would not count.
    """

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


class _SourceFinder(importlib.machinery.FileFinder):
    """A finder in a directory, whose packages, with and without `__init__.py`, are compiled anew as well."""

    def find_spec(self, fullname: str, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = super().find_spec(fullname, target)
        for directory in (spec and spec.submodule_search_locations) or ():
            _compile_anew(directory)
        return spec


def execute_file(path: Path, *, name: str) -> ModuleType:
    """Execute a file as the module `name`, and return it.

    It may import the files beside it, which hide no other module. Raises what the file raises.
    """
    directory = str(path.parent.resolve())
    spec = importlib.util.spec_from_loader(name, _SourceLoader(name, str(path)), origin=str(path))
    assert spec is not None
    spec.has_location = True
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if directory not in sys.path:
        sys.path.append(directory)
    _compile_anew(directory)
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def _compile_anew(directory: str) -> None:
    """Let Python compile the modules of a directory from their sources when they are imported."""
    kinds = [
        (importlib.machinery.ExtensionFileLoader, importlib.machinery.EXTENSION_SUFFIXES),
        (_SourceLoader, importlib.machinery.SOURCE_SUFFIXES)]
    sys.path_importer_cache[directory] = _SourceFinder(directory, *kinds)


_EXCERPT_BYTES = 4096
_NUM_SAMPLES = 64


def content_sample(path: Path) -> str:
    """Return a digest of a file's size, its beginning, its end and parts in between.

    It takes as long for a large file as for a small one, and finds other weights of the same shapes.
    """
    digest = hashlib.sha256()
    size = path.stat().st_size
    digest.update(str(size).encode())
    with path.open("rb") as file:
        for i in range(_NUM_SAMPLES + 1):
            file.seek(max(0, size - _EXCERPT_BYTES) * i // _NUM_SAMPLES)
            digest.update(file.read(_EXCERPT_BYTES))
    return digest.hexdigest()


def code_fingerprints() -> dict[str, dict[str, str]]:
    """Return what the user's modules of this process define: file -> name -> digest of its syntax.

    Comments and the layout of the text do not count, nor do settings (the fields of an experiment say how
    they have changed): only functions, classes and constants, in the experiment's file those constants that
    functions read.
    """
    found: dict[str, dict[str, str]] = {}
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if path is None or not path.endswith(".py") or not is_users_file(path):
            continue
        try:
            defined, is_assigned, read = _digests_of(read_text(Path(path)))
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue
        wanted = read if hasattr(module, "experiment") else None
        digests = {
            name: digest for name, digest in defined.items()
            if name not in is_assigned
            or (isinstance(vars(module).get(name), _PLAIN) and (wanted is None or name in wanted))}
        if (experiment := getattr(module, "experiment", None)) is not None:
            digests |= {name: digest_of(value) for name, value in functions_by_value(experiment).items()}
        found[Path(path).name] = found.get(Path(path).name, {}) | digests
    return found


@lru_cache(maxsize=1 << 10)
def _digests_of(source: str) -> tuple[dict[str, str], frozenset[str], frozenset[str]]:
    """Return the digests of what a source defines at its top, by name; those of these names to which it
    assigns; and the names that its functions read."""
    tree = ast.parse(source)
    nodes = {name: node for node in tree.body for name in _defined(node)}
    digests = {name: hashlib.sha256(ast.dump(node).encode()).hexdigest()[:16] for name, node in nodes.items()}
    is_assigned = [name for name, node in nodes.items() if isinstance(node, ast.Assign | ast.AnnAssign)]
    return digests, frozenset(is_assigned), frozenset(_read_by_functions(tree))


def functions_by_value(root: Any) -> dict[str, Any]:
    """Return the functions of a notebook or a script that an experiment uses, by name.

    The constants are there, too, that these functions read.
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        is_own = getattr(value, "__module__", None) == "__main__"
        if isinstance(value, FunctionType) and is_own:
            found[value.__qualname__] = value
            read = {name: value.__globals__[name] for name in _names_in(value.__code__)
                    if name in value.__globals__}
            found |= {name: constant for name, constant in read.items() if isinstance(constant, _PLAIN)}
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            waiting += [*read.values(), *cells, value.__defaults__, value.__kwdefaults__]
        elif isinstance(value, type):
            waiting += [*vars(value).values(), *value.__bases__] if is_own else []
        elif isinstance(value, list | tuple | set | frozenset):
            waiting += value
        elif isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, MethodType | staticmethod | classmethod):
            waiting += [value.__func__, getattr(value, "__self__", None)]
        elif isinstance(value, property):
            waiting += [value.fget, value.fset]
        elif isinstance(value, partial):
            waiting += [value.func, value.args, value.keywords]
        elif is_own or is_dataclass(value) or type(value).__module__.startswith("realhf."):
            waiting += [type(value), getattr(value, "__dict__", None)]
    return found


def _names_in(code: CodeType) -> list[str]:
    """Return the names that a function looks up, and those of the functions in it."""
    inner = [name for part in code.co_consts if isinstance(part, CodeType) for name in _names_in(part)]
    return [*code.co_names, *inner]


def digest_of(value: Any) -> str:
    """Return a digest of a function's code, without the lines where it stands, or of a constant."""

    def form(part: Any) -> Any:
        if isinstance(part, FunctionType):
            return [form(part.__code__), form(part.__defaults__), form(part.__kwdefaults__)]
        if isinstance(part, CodeType):
            constants = [form(each) for each in part.co_consts]
            return [part.co_code.hex(), part.co_names, part.co_varnames, constants]
        if isinstance(part, set | frozenset):  # Their order is another one in every process.
            return sorted(map(repr, part))
        return repr(part)

    return hashlib.sha256(repr(form(value)).encode()).hexdigest()[:16]


_PLAIN = (bool, int, float, str, bytes, list, tuple, set, frozenset, dict, re.Pattern)
"""Types of values on which functions may depend."""


def _read_by_functions(tree: ast.Module) -> set[str]:
    """Return the names that functions and classes read."""
    bodies = [node for node in tree.body
              if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    return {node.id for body in bodies for node in ast.walk(body) if isinstance(node, ast.Name)}


def _defined(node: ast.stmt) -> list[str]:
    """Return the names that a statement defines, if it is a definition or an assignment."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]
