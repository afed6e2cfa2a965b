"""A local server that speaks as much of the Hugging Face hub's API as huggingface_hub and datasets need, and
repositories for it, which are made in code.

    with hub([model_repository("Qwen/Qwen2.5-0.5B-Instruct"), gsm8k_repository()]) as server:
        subprocess.run([...], env=server.environment(home=tmp_path / "home"))
"""

import base64
import contextlib
import hashlib
import io
import json
import os
import random
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np
import pyarrow
import pyarrow.parquet
import safetensors.numpy

from realhf.checkpoint.tensor_files import tensor_shapes
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
"""The form of Qwen's templates, with their argument `enable_thinking`."""
TINY_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 256 + len(SPECIAL),
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "tie_word_embeddings": True,
    "initializer_range": 0.1, "eos_token_id": 258, "dtype": "float32",
}


@dataclass
class Repository:
    """A model or a data set of the hub: the files of its only branch, `main`."""

    name: str
    files: dict[str, bytes]
    kind: Literal["models", "datasets"] = "models"
    is_gated: bool = False
    """Whether requests without the token `secret` are refused."""
    older: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Files by commit of what `update` has replaced."""

    @property
    def commit(self) -> str:
        digest = hashlib.sha1(self.name.encode())
        for path, content in sorted(self.files.items()):
            digest.update(path.encode() + content)
        return digest.hexdigest()

    def update(self, files: dict[str, bytes]) -> None:
        """Commit other files in place of those with the same paths."""
        self.older[self.commit] = dict(self.files)
        self.files = self.files | files

    def at(self, revision: str) -> dict[str, bytes] | None:
        """Return the files of a branch or commit, None if there is none."""
        return self.files if revision in ("main", self.commit) else self.older.get(revision)

    def commit_of(self, revision: str) -> str:
        return self.commit if revision == "main" else revision


@dataclass
class Hub:
    """A running server: its address, and the requests that it has got."""

    endpoint: str
    repositories: Sequence[Repository]
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Method and path of each request."""

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """Return the environment of a process that uses this hub, with its cache in `home`."""
        own = {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
        names = ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_DATASETS_CACHE")
        return {key: value for key, value in os.environ.items() if key not in names} | own | more

    def downloads(self) -> Counter[str]:
        """Return how often each file was downloaded, by its path behind the commit."""
        gets = (path for method, path in self.requests if method == "GET" and "/resolve/" in path)
        return Counter(path.partition("/resolve/")[2].partition("/")[2] for path in gets)


@contextlib.contextmanager
def hub(repositories: Sequence[Repository]) -> Iterator[Hub]:
    """Serve repositories on a free port of this machine until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    state = Hub(f"http://127.0.0.1:{server.server_address[1]}", repositories)
    server.hub = state  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        """Print nothing: `Hub.requests` has all requests."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        state: Hub = self.server.hub  # type: ignore[attr-defined]
        path = unquote(urlsplit(self.path).path)
        state.requests.append((self.command, path))
        words = path.strip("/").split("/")
        if words == ["api", "repos", "create"]:
            self._create(state, json.loads(body))
        elif words == ["api", "validate-yaml"]:  # The head of a model card.
            self._json({"errors": [], "warnings": []})
        elif words[0] == "api" and words[1] in ("models", "datasets"):
            self._api(state, words[1], "/".join(words[2:4]), words[4:], body)
        elif words[0] == "datasets" and words[3:4] == ["resolve"]:
            self._file(state, "datasets", "/".join(words[1:3]), words[4], "/".join(words[5:]))
        elif words[2:3] == ["resolve"]:
            self._file(state, "models", "/".join(words[:2]), words[3], "/".join(words[4:]))
        else:
            self._refuse(404, "")

    def _create(self, state: Hub, asked: dict[str, Any]) -> None:
        name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
        if not any(repository.name == name for repository in state.repositories):
            state.repositories = [*state.repositories, Repository(name, {})]
        self._json({"url": f"{state.endpoint}/{name}", "name": name, "private": asked.get("private", False)})

    def _upload(self, repository: Repository, what: str, body: bytes) -> None:
        """Say that all files go into the commit itself, or take a commit with such files."""
        if what == "preupload":
            files = json.loads(body)["files"]
            self._json({"files": [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]})
            return
        entries = [json.loads(line) for line in body.splitlines()]
        files = [entry["value"] for entry in entries if entry["key"] == "file"]
        repository.update({file["path"]: base64.b64decode(file["content"]) for file in files})
        commit = repository.commit
        self._json({"commitUrl": f"/{repository.name}/commit/{commit}", "commitOid": commit})

    def _find(self, state: Hub, kind: str, name: str) -> Repository | None:
        """Return a repository, or answer with the hub's error about it and return None."""
        found = next((r for r in state.repositories if (r.kind, r.name) == (kind, name)), None)
        if found is None:  # The hub says 401 to strangers, as it might be private.
            self._refuse(401, "RepoNotFound")
        elif found.is_gated and self.headers.get("Authorization") != "Bearer secret":
            self._refuse(403 if self.headers.get("Authorization") else 401, "GatedRepo")
            return None
        return found

    def _api(self, state: Hub, kind: str, name: str, rest: list[str], body: bytes) -> None:
        repository = self._find(state, kind, name)
        if repository is None:
            return
        what = rest[0] if rest else "revision"
        if what in ("preupload", "commit"):
            self._upload(repository, what, body)
            return
        revision = rest[1] if len(rest) > 1 else "main"
        files = repository.at(revision)
        if files is None:
            self._refuse(404, "RevisionNotFound")
        elif what == "revision":
            siblings = [{"rfilename": path} for path in files]
            self._json({
                "id": name, "modelId": name, "sha": repository.commit_of(revision), "siblings": siblings,
                "private": False, "gated": "auto" if repository.is_gated else False, "tags": [],
                "downloads": 0, "likes": 0,
            })
        elif what == "tree":
            folder = "/".join(rest[2:])
            is_recursive = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].lower()
            self._json(_tree(files, folder, recursive=is_recursive in ("true", "1")))
        elif what == "paths-info":
            wanted = _paths(body, self.headers.get("Content-Type", ""))
            entries = _tree(files, "", recursive=True)
            self._json([entry for entry in entries if entry["path"] in wanted])
        else:
            self._refuse(404, "")

    def _file(self, state: Hub, kind: str, name: str, revision: str, path: str) -> None:
        repository = self._find(state, kind, name)
        if repository is None:
            return
        files = repository.at(revision)
        if files is None or path not in files:
            self._refuse(404, "RevisionNotFound" if files is None else "EntryNotFound")
            return
        content = files[path]
        headers = {
            "X-Repo-Commit": repository.commit_of(revision), "ETag": f'"{_blob_id(content)}"',
            "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream",
        }
        if wanted := self.headers.get("Range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            stop = min(int(last) + 1, len(content)) if last else len(content)
            headers["Content-Range"] = f"bytes {first}-{stop - 1}/{len(content)}"
            self._send(206, content[int(first) : stop], headers)
        else:
            self._send(200, content, headers)

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str) -> None:
        body = json.dumps({"error": code or "not found"}).encode()
        self._send(status, body, {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.wfile.write(content)


def _tree(files: dict[str, bytes], folder: str, *, recursive: bool) -> list[dict[str, Any]]:
    """Return the entries of a folder, and with `recursive` those of its folders."""
    prefix = f"{folder}/" if folder else ""
    inside = {path: content for path, content in files.items() if path.startswith(prefix)}
    entries = [
        {"type": "file", "path": path, "size": len(content), "oid": _blob_id(content)}
        for path, content in inside.items() if recursive or "/" not in path.removeprefix(prefix)
    ]
    folders = {str(parent) for path in inside for parent in Path(path).parents} - {".", folder}
    entries += [
        {"type": "directory", "path": path, "size": 0, "oid": _blob_id(path.encode())}
        for path in sorted(folders)
        if path.startswith(prefix) and (recursive or "/" not in path.removeprefix(prefix))
    ]
    return entries


def _paths(body: bytes, content_type: str) -> list[str]:
    if "json" in content_type:
        paths = json.loads(body)["paths"]
        return [paths] if isinstance(paths, str) else paths
    return parse_qs(body.decode()).get("paths", [])


def _blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@cache
def byte_tokenizer_files() -> dict[str, bytes]:
    """Return the files of a tokenizer with a token for each byte, ChatML's special tokens and a template."""
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer  # Imported here, as it takes a second.

    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL]
    tokenizer = Qwen2Tokenizer(
        {symbol: i for i, symbol in enumerate(symbols)}, merges=[], pad_token=SPECIAL[0],
        eos_token=SPECIAL[2], unk_token=SPECIAL[0], additional_special_tokens=[SPECIAL[1]])
    tokenizer.chat_template = CHAT_TEMPLATE
    with tempfile.TemporaryDirectory() as directory:
        tokenizer.save_pretrained(directory)
        return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


def model_repository(name: str = "Qwen/Qwen2.5-0.5B-Instruct", **changes: Any) -> Repository:
    """Return a tiny model of random weights with a byte tokenizer; `changes` are fields of its config.json.

    Beside safetensors it has pickled weights, which nobody should download.
    """
    fields = TINY_CONFIG | changes
    config = ModelConfig.from_hf(fields)
    rng = np.random.default_rng(0)
    tensors = {
        key: (rng.standard_normal(shape) * 0.1).astype(np.float32) if len(shape) > 1 else
        np.full(shape, float("norm" in key), np.float32)
        for key, shape in tensor_shapes(model_spec(config)).items()
    }
    files = {
        "config.json": json.dumps(fields).encode(),
        "generation_config.json": json.dumps({"eos_token_id": fields["eos_token_id"]}).encode(),
        "model.safetensors": safetensors.numpy.save(tensors, metadata={"format": "pt"}),
        "pytorch_model.bin": b"a pickle", "README.md": b"# A tiny model\n", "LICENSE": b"Apache-2.0\n",
    }
    return Repository(name, files | byte_tokenizer_files())


def gsm8k_rows(num_rows: int, *, seed: int) -> list[dict[str, str]]:
    """Return questions and answers in the form of GSM8K: a calculation, and the number behind `####`."""
    rng = random.Random(seed)
    rows = []
    for _ in range(num_rows):
        first = rng.randrange(2, 60)
        second = rng.randrange(2, 30)
        question = f"Ann has {first} apples and buys {second} more. How many apples does Ann have?"
        total = first + second
        answer = f"Ann has {first} + {second} = <<{first}+{second}={total}>>{total} apples.\n#### {total}"
        rows.append({"question": question, "answer": answer})
    return rows


def gsm8k_repository(name: str = "openai/gsm8k", num_rows: int = 64) -> Repository:
    """Return a data set in the layout of openai/gsm8k: config `main`, splits `train` and `test`, parquet."""
    splits = {split: gsm8k_rows(num_rows, seed=i) for i, split in enumerate(("train", "test"))}
    card = "---\nconfigs:\n- config_name: main\n  data_files:\n" + "".join(
        f"  - split: {split}\n    path: main/{split}-*\n" for split in splits
    ) + "- config_name: socratic\n  data_files:\n  - split: train\n    path: main/train-*\n---\n"
    files = {f"main/{split}-00000-of-00001.parquet": parquet_bytes(rows) for split, rows in splits.items()}
    return Repository(name, files | {"README.md": card.encode()}, kind="datasets")


def parquet_bytes(rows: Sequence[dict[str, Any]]) -> bytes:
    """Return rows as a parquet file."""
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), buffer)
    return buffer.getvalue()
