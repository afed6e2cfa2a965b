"""Executes Python files of the user, always as they are on the disk now.

Python trusts a compiled copy (`__pycache__`) if the source's size and its time in whole seconds are those of
when it was compiled: an edit of equal length within a second would not count.
"""

import importlib.machinery
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType


class _SourceLoader(importlib.machinery.SourceFileLoader):
    """A loader that compiles the source anew."""

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
