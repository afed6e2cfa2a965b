"""Finds models and tokenizers by their names on the Hugging Face hub. Free of torch.

huggingface_hub does the work, with its own cache and environment variables (HF_HOME, HF_HUB_CACHE,
HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE). What is in the cache is used without a question to the hub. The
library is imported on use, as experiments with local files need none of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from realhf.errors import UserError

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.*",
    "merges.txt", "tokenizer.model*", "*.tiktoken", "chat_template.*", "additional_chat_templates/*.jinja",
)
TERMS_FILES = ("LICENSE*", "LICENCE*", "NOTICE*", "Notice*", "USE_POLICY*")
_SMALL_FILES = (
    "config.json", "generation_config.json", "adapter_config.json", *TOKENIZER_FILES, *TERMS_FILES,
)
"""Patterns of the files that checks and plans need."""
_NEVER = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt", "*.py")
"""Patterns of pickles and code, which are not downloaded at all."""
_INDEX = "model.safetensors.index.json"
_WHOLE = ("model.safetensors", "adapter_model.safetensors")
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*)(?:@([\w][\w./-]*))?")
_FILE_ENDINGS = (".json", ".jsonl", ".parquet", ".yaml", ".csv", ".txt", ".safetensors")


@dataclass(frozen=True)
class HubName:
    """The name of a repository on the hub, and a branch, tag or commit of it; None: its main branch."""

    repository: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"


def parse_hub_name(name: str) -> HubName | None:
    """Return the parts of a name of the form `org/name` or `org/name@revision`; None for other texts."""
    match = _NAME.fullmatch(name)
    if match is None or match[1].endswith(_FILE_ENDINGS) or ".." in name or "--" in match[1]:
        return None
    return HubName(match[1], match[2])


def find_model(name: str, *, weights: bool = False) -> Path:
    """Return a path as it is, or the directory in the hub's cache of a model, tokenizer or adapters by name.

    Without `weights` only the small files are downloaded if they are missing. Raises UserError if the files
    are neither in the cache nor on the hub.
    """
    path = Path(name)
    if path.exists() or (hub_name := parse_hub_name(name)) is None:
        return path
    return _snapshot(hub_name, weights=weights)


def cached_name(path: Path) -> str | None:
    """Return the hub's name of the model at a path; None if the path is not in the hub's cache."""
    cached = [part for part in path.parts if part.startswith("models--")]
    return cached[-1].removeprefix("models--").replace("--", "/", 1) if cached else None


def commits_of(names: Iterable[str]) -> dict[str, str]:
    """Return the commits of those names that are the hub's, and not local paths."""
    hub_names = [name for name in names if not Path(name).exists() and parse_hub_name(name) is not None]
    return {name: find_model(name).name for name in hub_names}


def is_incomplete(directory: Path) -> bool:
    """Return whether a directory of the hub's cache lacks safetensors weights that are on the hub."""
    if directory.parent.name != "snapshots" or not directory.parent.parent.name.startswith("models--"):
        return False
    return any(not (directory / file).is_file() for file in _weight_files(_listing(directory)))


@lru_cache(maxsize=256)
def _snapshot(name: HubName, *, weights: bool) -> Path:
    if (cached := _cached(name, weights=weights)) is not None:
        return cached
    with host_lock(f"models--{name.repository.replace('/', '--')}"), asking_hub(name, kind="model"):
        if (cached := _cached(name, weights=weights)) is not None:  # Another process has downloaded it.
            return cached
        directory = _download(name, _SMALL_FILES)
        if not weights:
            return directory
        files = _weight_files(_listing(directory))
        if not files:
            raise UserError(
                f"{str(name)!r} has no safetensors weights on the hub; pickled weights (*.bin) are never "
                "downloaded, as reading them runs code: take another model or convert it")
        return _download(HubName(name.repository, directory.name), files)


def _cached(name: HubName, *, weights: bool) -> Path | None:
    """Return the cached directory of a name if it has all files that are needed; do not ask the hub."""
    hub = _library()
    with contextlib.suppress(hub.errors.LocalEntryNotFoundError, hub.errors.HFValidationError):
        directory = Path(hub.snapshot_download(
            name.repository, revision=name.revision, local_files_only=True,
            allow_patterns=list(_SMALL_FILES), ignore_patterns=list(_NEVER)))
        listed = _listing(directory)
        is_known = bool(_listed_on_hub(directory)) or hub.constants.HF_HUB_OFFLINE
        files = _weight_files(listed) if weights else []
        has_weights = not weights or bool(files)
        if is_known and has_weights and all((directory / file).is_file() for file in files):
            return directory
    return None


def _download(name: HubName, patterns: Collection[str]) -> Path:
    hub = _library()
    are_small = patterns is _SMALL_FILES
    were_shown = not hub.utils.are_progress_bars_disabled()
    if are_small:
        hub.utils.disable_progress_bars()
    try:
        return Path(hub.snapshot_download(
            name.repository, revision=name.revision, allow_patterns=list(patterns),
            ignore_patterns=list(_NEVER)))
    finally:
        if are_small and were_shown:
            hub.utils.enable_progress_bars()


def _listing(directory: Path) -> set[str]:
    """Return the files that a commit has on the hub; if no list of them was kept, those in the cache."""
    here = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    return _listed_on_hub(directory) or here


def _listed_on_hub(directory: Path) -> set[str]:
    hub = _library()
    repository = directory.parent.parent.name.removeprefix("models--").replace("--", "/", 1)
    with contextlib.suppress(hub.errors.CachedRepoTreeNotFoundError):
        tree = hub.get_cached_repo_tree(
            repository, revision=directory.name, cache_dir=directory.parent.parent.parent)
        return {file.path for file in tree}
    return set()


def _weight_files(files: Collection[str]) -> list[str]:
    """Return the safetensors files of a model or of adapters among the files of a repository."""
    if whole := [file for file in _WHOLE if file in files]:
        return whole[:1]
    if _INDEX not in files:
        return []
    parts = [file for file in files if file.endswith(".safetensors") and "/" not in file]
    return [_INDEX, *sorted(file for file in parts if not file.startswith("consolidated"))]


@contextlib.contextmanager
def host_lock(name: str) -> Iterator[None]:
    """Hold a lock of this name among the processes of this host, in the hub's cache."""
    directory = Path(_library().constants.HF_HUB_CACHE) / ".locks"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / f"realhf-{name}.lock").open("a")
    except OSError as error:
        raise UserError(
            f"the hub's cache {directory.parent} cannot be written ({error.strerror}): set HF_HOME to a "
            "directory of your own") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def asking_hub(name: HubName, *, kind: str) -> Iterator[None]:
    """Turn errors of huggingface_hub in the `with` block into a UserError; `kind` is model or data set."""
    hub = _library()
    errors = hub.errors
    shown = repr(str(name))
    log_in = "set HF_TOKEN or log in with `hf auth login`"
    try:
        yield
    except UserError:
        raise
    except errors.GatedRepoError as error:
        page = f"{hub.constants.ENDPOINT}/{'datasets/' * (kind != 'model')}{name.repository}"
        raise UserError(f"{shown} is gated: accept its terms at {page}, and {log_in}") from error
    except errors.RepositoryNotFoundError as error:
        what = f"{shown} is no file or directory here, and the hub at {hub.constants.ENDPOINT} shows no such"
        raise UserError(f"{what} {kind}: check the name; if it is private, {log_in}") from error
    except errors.RevisionNotFoundError as error:
        what = f"the hub's {kind} {name.repository!r} has no branch, tag or commit {name.revision!r}"
        raise UserError(f"{what}: see its page for those that it has") from error
    except Exception as error:
        raise _unreachable(error, shown, kind) from error


def _unreachable(error: Exception, shown: str, kind: str) -> UserError:
    """Return the UserError for a repository that could not be downloaded because of `error`."""
    hub = _library()
    what = f"{shown} is no file or directory here, and the {kind} is not in the hub's cache"
    where = f"{what} {hub.constants.HF_HUB_CACHE}"
    if hub.constants.HF_HUB_OFFLINE:
        return UserError(f"{where}, and HF_HUB_OFFLINE is set: unset it once to download it")
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        what = f"the hub at {hub.constants.ENDPOINT} answers {status} about {shown}"
        return UserError(f"{what}: try again later")
    causes = [error]
    while isinstance(causes[-1].__cause__, Exception):
        causes.append(causes[-1].__cause__)
    why = f"{type(causes[-1]).__name__}: {' '.join(str(causes[-1]).split()) or 'no message'}"
    kinds = (hub.errors.LocalEntryNotFoundError, hub.errors.HTTPError, ConnectionError)
    if any(isinstance(cause, kinds) for cause in causes):
        how = "connect to the network, set HF_ENDPOINT to a mirror, or give a local path"
        return UserError(f"{where}, and the hub at {hub.constants.ENDPOINT} cannot be reached ({why}): {how}")
    return UserError(f"{shown} cannot be downloaded to {hub.constants.HF_HUB_CACHE} ({why})")


def _library() -> Any:
    import huggingface_hub  # Imported here, as only names of the hub need it.
    import huggingface_hub.errors
    import huggingface_hub.utils

    return huggingface_hub
