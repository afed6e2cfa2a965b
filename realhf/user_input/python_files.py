"""Executes Python files of the user, always as they are on the disk now.

Python trusts a compiled copy (`__pycache__`) if the source's size and its time in whole seconds are those of
when it was compiled: an edit of equal length within a second would not count.
"""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import CodeType, ModuleType


class _SourceLoader(importlib.machinery.SourceFileLoader):
    """A loader that compiles the source anew, for a module and for the modules of a package."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)

    def exec_module(self, module: ModuleType) -> None:
        for directory in getattr(module, "__path__", ()):
            _compile_anew(directory)
        super().exec_module(module)


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
    sys.path.append(directory)
    _compile_anew(directory)
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def _compile_anew(directory: str) -> None:
    """Let Python compile the modules of a directory from their sources when they are imported."""
    kinds = [
        (importlib.machinery.ExtensionFileLoader, importlib.machinery.EXTENSION_SUFFIXES),
        (_SourceLoader, importlib.machinery.SOURCE_SUFFIXES)]
    sys.path_importer_cache[directory] = importlib.machinery.FileFinder(directory, *kinds)
