"""The kinds of cases that `benchmarks/fuzz/inputs.py` draws: command lines, and the files that they read."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from benchmarks.fuzz.documents import (
    BOMBS,
    CLASSES,
    CLUSTERS,
    CONFIGS,
    EXPERIMENT,
    GENERATION,
    LAYOUTS,
    MANIFEST,
    METRICS,
    MODEL,
    PARQUET,
    PLANS,
    PROFILE,
    RANK_FILE,
    ROWS,
    SFT,
    TEMPLATES,
    TENSOR_BYTES,
    TENSORS,
    TOKENIZER,
    TOKENIZER_CONFIG,
    TOKENIZERS,
)
from benchmarks.fuzz.mutations import (
    SCALARS,
    as_json,
    as_yaml,
    damaged,
    damaged_bytes,
    damaged_text,
    files_like,
)

_FEW_SECONDS = "0.001"
_LAYOUT_OPTIONS = ("--src", "t2@0-1", "--dst", "d2@0-1")
_OVERRIDES = [
    "--steps", "--batch-size", "--group-size", "--seed", "--eval-every", "--checkpoint-every", "--log-every",
    "--dataset.path", "--dataset.max-rows", "--dataset.max-prompt-tokens", "--dataset.prompt-key",
    "--dataset.shuffle", "--dataset.no-shuffle", "--eval-dataset.path", "--expected.prompt-tokens",
    "--actor.model", "--actor.dtype", "--actor.head", "--actor.engine", "--actor.optimizer.lr",
    "--actor.optimizer.betas", "--actor.optimizer.schedule", "--actor.lora.rank", "--actor.lora.alpha",
    "--actor.lora.target-modules", "--actor.follow-rate", "--ref.model", "--reward.model", "--tokenizer",
    "--sampling.temperature", "--sampling.top-p", "--sampling.top-k", "--sampling.max-new-tokens",
    "--loss.kl-coef", "--loss.average", "--loss.dual-clip", "--minibatches", "--epochs", "--max-rows",
    "--kv-cache-gib", "--prefill-tokens", "--plan", "--cluster", "--nproc", "--json", "--scale-by-std",
]


@dataclass(frozen=True)
class Case:
    """A command line for `main` and the files in its directory, which `{dir}` stands for in both.

    The sentence about an error must have one of `names` in it. `special` maps names of files to what they are
    instead of files, one of SPECIAL.
    """

    words: tuple[str, ...]
    files: Mapping[str, bytes] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    special: Mapping[str, str] = field(default_factory=dict)


SPECIAL = ("fifo", "device", "directory", "socket", "loop", "huge", "gone")
"""What can be in a file's place: `huge` is a file of 100 GB without content, `loop` a link to itself."""


def write_task(directory: Path) -> None:
    """Write what the cases share: a tokenizer, a model's config, data and an experiment."""
    (directory / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (directory / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))
    (directory / "config.json").write_text(json.dumps(MODEL))
    (directory / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    rows = {"dataset": {**EXPERIMENT["dataset"], "path": "{dir}/rows.jsonl"}}
    optimizer = {"()": "OptimizerConfig"}
    model = {"()": "Role", "model": "{dir}/model", "random_init": True, "optimizer": optimizer}
    experiments: dict[str, Any] = {
        "exp.py": EXPERIMENT,
        "rows.py": {**EXPERIMENT, **rows}, "sft_rows.py": {**SFT, **rows},
        "native.py": {**EXPERIMENT, "actor": model},
        "chats.py": {**SFT, "tokenizer": "{dir}/chat", "dataset": {**rows["dataset"], "chat": True}},
        "parquet.py": {**SFT, "dataset": {**EXPERIMENT["dataset"], "path": "{dir}/rows.parquet"}},
        "transformers.py": {**EXPERIMENT, "actor": {**model, "engine": "transformers"}},
    }
    for name, document in experiments.items():
        (directory / name).write_text(experiment_file(document).replace("{dir}", str(directory)))


def experiment_file(document: Any) -> str:
    """Return the Python code of an experiment: mappings with a key `()` call the class that it names."""
    reward = "def reward(prompts, completions, completion_ids, answer):\n    return [0.5 for _ in prompts]\n"
    return f"from realhf import *\n\n{reward}\nexperiment = {_code(document)}\n"


def _code(value: Any) -> str:
    if isinstance(value, dict) and (name := value.get("()")) in CLASSES:
        fields = ", ".join(f"{key!r}: {_code(part)}" for key, part in value.items() if key != "()")
        return f"{name}(**{{{fields}}})" if fields else f"{name}()"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_code(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "(" + "".join(f"{_code(part)}, " for part in value) + ")"
    if isinstance(value, float):
        return f"float({str(value)!r})"
    return value[1:] if isinstance(value, str) and value.startswith("=") else repr(value)


def _on_file(name: str, *words: str, **more: bytes) -> Callable[[bytes], Case]:
    """Return a function from a file's content to the case that reads it."""
    return lambda content: Case(words, {name: content, **more}, (name,))


def _plans() -> st.SearchStrategy[Case]:
    check = ("check", "{dir}/exp.py", "--plan", "{dir}/plan.yaml")
    return st.builds(
        lambda content, more: Case((*check, *more), {"plan.yaml": content}, ("plan.yaml",)),
        files_like(PLANS, as_yaml),
        st.sampled_from(((), (), ("--json",), ("--cluster", "cpu-laptop"), ("--nproc", "3"))),
    )


def _clusters() -> st.SearchStrategy[Case]:
    plan = ("plan", "{dir}/exp.py", "--cluster", "{dir}/cluster.yaml", "--time-limit", _FEW_SECONDS)
    check = ("check", "{dir}/exp.py", "--cluster", "{dir}/cluster.yaml")
    moves = ("realloc", "--model", "tiny", "--cluster", "{dir}/cluster.yaml", *_LAYOUT_OPTIONS)
    return st.builds(
        lambda words, content: Case(words, {"cluster.yaml": content}, ("cluster.yaml", "the cluster")),
        st.sampled_from([(*words, *more) for words in (plan, check, moves) for more in ((), ("--json",))]),
        files_like(CLUSTERS, as_yaml),
    )


def _profiles() -> st.SearchStrategy[Case]:
    words = ("plan", "{dir}/exp.py", "--profile", "{dir}/profile.yaml", "--time-limit", _FEW_SECONDS)
    return files_like([PROFILE], as_yaml).map(_on_file("profile.yaml", *words))


def _layouts() -> st.SearchStrategy[Case]:
    letters = st.text("dtpcezq0123456789@,- ", max_size=24)
    sizes = st.builds("{}{}".format, st.sampled_from("dtpce"), st.integers(0, 10**9))
    ranges = st.integers(0, 10**10).map(lambda last: f"d{last + 1}@0-{last}")
    text = st.one_of(
        damaged_text(LAYOUTS).map(lambda data: data.decode(errors="replace")), letters, ranges,
        st.builds(lambda size, mesh: f"{size}@{mesh}", sizes, st.sampled_from(("0", "0-3", "0,1", "99999"))),
        SCALARS.map(str),
    )
    text = text.map(lambda text: text[:200].replace("\x00", ""))

    def case(text: str, way: int) -> Case:
        if way < 2:
            words = ("realloc", "--model", "tiny", f"--src={text}", "--dst", "d2@0-1")
            return Case((*words, "--json") if way else words, names=("--src",))
        if way == 2:
            words = ("plan", "{dir}/exp.py", "--cluster", "cpu-laptop", "--time-limit", _FEW_SECONDS)
            return Case((*words, f"--pin=actor_train={text}"), names=("--pin",))
        plan = {"calls": {**PLANS[0]["calls"], "actor_train": {"layout": text}}}
        words = ("check", "{dir}/exp.py", "--plan", "{dir}/plan.yaml")
        return Case(words, {"plan.yaml": as_yaml(plan)}, ("plan.yaml",))

    return st.builds(case, text, st.integers(0, 3))


def _as_lines(rows: Any) -> bytes:
    return b"".join(as_json(row) + b"\n" for row in rows) if isinstance(rows, list) else as_json(rows)


def _datasets() -> st.SearchStrategy[Case]:
    return st.builds(
        lambda experiment, content: Case(
            ("check", f"{{dir}}/{experiment}"), {"rows.jsonl": content}, ("rows.jsonl",)
        ),
        st.sampled_from(("rows.py", "sft_rows.py")),
        files_like([ROWS], _as_lines),
    )


def _overrides() -> st.SearchStrategy[Case]:
    names = st.one_of(
        st.sampled_from(_OVERRIDES), st.sampled_from(_OVERRIDES),
        damaged_text(_OVERRIDES).map(lambda data: data.decode(errors="replace")[:60]),
    )
    values = st.one_of(
        SCALARS.map(str),
        st.sampled_from(("None", "{dir}", "{dir}/data.jsonl", "tiny", "True", "float64", "8")),
        st.lists(SCALARS.map(str), max_size=3).map(" ".join),
    )
    option = st.builds(
        lambda name, value, way: [name] if way == 0 else [f"{name}={value}"] if way == 1 else [name, value],
        names, values, st.integers(0, 4),
    )

    def case(options: Sequence[Sequence[str]]) -> Case:
        words = [word[:300].replace("\x00", "") for option in options for word in option]
        return Case(("check", "{dir}/exp.py", *words))

    return st.lists(option, min_size=1, max_size=2).map(case)


def _configs() -> st.SearchStrategy[Case]:
    moves = ("realloc", "--model", "{dir}/model", "--src", "d1@0", "--dst", "d2@0-1")
    checks = [("check", f"{{dir}}/{name}.py") for name in ("native", "transformers")]
    plans = [("plan", words[1], "--cluster", "h100-1x8", "--time-limit", _FEW_SECONDS) for words in checks]
    ways = st.sampled_from([moves, *checks, *plans])
    generation = files_like([GENERATION], as_json)
    config = files_like(CONFIGS, as_json)
    both = st.tuples(config, st.none()) | st.tuples(config.map(lambda _: as_json(CONFIGS[0])), generation)

    def case(words: tuple[str, ...], contents: tuple[bytes, bytes | None]) -> Case:
        files = {"model/config.json": contents[0]}
        if contents[1] is not None:
            files["model/generation_config.json"] = contents[1]
        names = ("config.json", "actor", "layout", "--src", "--dst", "--model", "native.py")
        return Case(words, files, names)

    return st.builds(case, ways, both)


def _experiments() -> st.SearchStrategy[Case]:
    plan = ("plan", "{dir}/mine.py", "--cluster", "cpu-laptop", "--time-limit", _FEW_SECONDS)
    check = ("check", "{dir}/mine.py")
    return st.builds(
        lambda words, document: Case(words, {"mine.py": experiment_file(document).encode(errors="replace")},
                                     ("mine.py", "expected.")),
        st.sampled_from((check, check, plan)),
        damaged([EXPERIMENT, SFT]),
    )


def _checkpoint(manifest: bytes, *, checksum: bytes | None = None, **files: bytes) -> Case:
    """Return the case that reads a checkpoint with this manifest; `files` are others than the undamaged."""
    digest = hashlib.sha256(manifest if checksum is None else checksum).hexdigest()
    beside = {"manifest.json": manifest, "manifest.sha256": f"{digest}  manifest.json\n".encode()}
    content = {"metrics.jsonl": METRICS, RANK_FILE: TENSORS} | files
    return Case(("(checkpoint)", "{dir}"), {**content, **beside}, ("{dir}",))


def _manifests() -> st.SearchStrategy[Case]:
    return st.builds(
        lambda content, has_checksum: _checkpoint(content, checksum=None if has_checksum else b"other"),
        files_like([MANIFEST], as_json), st.integers(0, 4),
    )


def _checkpoint_files() -> st.SearchStrategy[Case]:
    """Draw files of a checkpoint that are damaged before their checksums are made."""

    def case(name: str, content: bytes) -> Case:
        entry = {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        manifest = {**MANIFEST, "files": {**MANIFEST["files"], name: entry}}
        return _checkpoint(as_json(manifest), **{name: content})

    metrics = files_like([[json.loads(METRICS)]], _as_lines).map(lambda data: ("metrics.jsonl", data))
    tensors = _safetensors().map(lambda data: (RANK_FILE, data))
    return st.one_of(metrics, tensors).map(lambda pair: case(*pair))


def _safetensors() -> st.SearchStrategy[bytes]:
    """Draw files of tensors: damaged headers with their lengths, and damaged bytes."""
    header = json.loads(TENSORS[8:-TENSOR_BYTES])
    headers = files_like([header], as_json).map(
        lambda text: len(text).to_bytes(8, "little") + text + TENSORS[-TENSOR_BYTES:])
    return st.one_of(headers, headers, damaged_bytes(TENSORS))


def _weights() -> st.SearchStrategy[Case]:
    """Draw model directories: their tensors, and the index of these."""
    index = {"metadata": {"total_size": TENSOR_BYTES}, "weight_map": {"w": "part.safetensors"}}
    whole = _safetensors().map(lambda data: {"weights/model.safetensors": data})
    parts = files_like([index], as_json).map(lambda data: {
        "weights/model.safetensors.index.json": data, "weights/part.safetensors": TENSORS})
    return st.one_of(whole, parts).map(
        lambda files: Case(("(weights)", "{dir}/weights"), files, ("{dir}/weights",)))


def _tokenizers() -> st.SearchStrategy[Case]:
    """Draw tokenizers, their settings and their chat templates."""
    files = {
        "chat/tokenizer.json": as_json(TOKENIZER), "chat/tokenizer_config.json": as_json(TOKENIZER_CONFIG),
        "rows.jsonl": _as_lines(ROWS),
    }
    changes = st.one_of(
        files_like(TOKENIZERS, as_json).map(lambda data: {"chat/tokenizer.json": data}),
        files_like([TOKENIZER_CONFIG], as_json).map(lambda data: {"chat/tokenizer_config.json": data}),
        st.one_of(damaged_text(TEMPLATES), st.sampled_from(BOMBS).map(str.encode)).map(
            lambda data: {"chat/chat_template.jinja": data}),
    )
    names = ("{dir}/chat", "rows.jsonl", "tokenizer", "actor")
    return changes.map(lambda changed: Case(("check", "{dir}/chats.py"), {**files, **changed}, names))


def _parquet() -> st.SearchStrategy[Case]:
    return damaged_bytes(PARQUET).map(_on_file("rows.parquet", "check", "{dir}/parquet.py"))


def _special_files() -> st.SearchStrategy[Case]:
    """Draw commands of which one file is no regular file, or has no end."""
    files = {
        "plan.yaml": as_yaml(PLANS[0]), "cluster.yaml": as_yaml(CLUSTERS[0]), "rows.jsonl": _as_lines(ROWS),
        "profile.yaml": as_yaml(PROFILE), "model/config.json": as_json(CONFIGS[0]),
        "model/generation_config.json": as_json(GENERATION),
        "chat/tokenizer.json": as_json(TOKENIZER), "chat/tokenizer_config.json": as_json(TOKENIZER_CONFIG),
        "chat/chat_template.jinja": TEMPLATES[0].encode(), "weights/model.safetensors": TENSORS,
    }
    few = ("--time-limit", _FEW_SECONDS)
    commands: dict[str, tuple[tuple[str, ...], ...]] = {
        "plan.yaml": (("check", "{dir}/exp.py", "--plan", "{dir}/plan.yaml"),),
        "cluster.yaml": (("plan", "{dir}/exp.py", "--cluster", "{dir}/cluster.yaml", *few),),
        "profile.yaml": (("plan", "{dir}/exp.py", "--profile", "{dir}/profile.yaml", *few),),
        "rows.jsonl": (
            ("check", "{dir}/rows.py"), ("plan", "{dir}/rows.py", "--cluster", "cpu-laptop", *few)),
        "model/config.json": (("check", "{dir}/native.py"), ("check", "{dir}/transformers.py")),
        "model/generation_config.json": (("check", "{dir}/native.py"),),
        "chat/tokenizer.json": (("check", "{dir}/chats.py"),),
        "chat/tokenizer_config.json": (("check", "{dir}/chats.py"),),
        "chat/chat_template.jinja": (("check", "{dir}/chats.py"),),
        "weights/model.safetensors": (("(weights)", "{dir}/weights"),),
    }
    pairs = [(name, words) for name, ways in commands.items() for words in ways]

    def case(pair: tuple[str, tuple[str, ...]], kind: str) -> Case:
        name, words = pair
        others = {other: content for other, content in files.items() if other != name}
        names = (Path(name).name, str(Path(name).parent), "actor", "dataset")
        return Case(words, others, names, {name: kind})

    checkpoint = st.builds(
        lambda name, kind: _special_in_checkpoint(name, kind),
        st.sampled_from(("manifest.json", "manifest.sha256", "metrics.jsonl", RANK_FILE)),
        st.sampled_from(SPECIAL))
    return st.one_of(st.builds(case, st.sampled_from(pairs), st.sampled_from(SPECIAL)), checkpoint)


def _special_in_checkpoint(name: str, kind: str) -> Case:
    case = _checkpoint(as_json(MANIFEST))
    return replace(case, files={n: c for n, c in case.files.items() if n != name}, special={name: kind})


def _long_rows() -> st.SearchStrategy[Case]:
    """Draw rows of which one has 15 to 60 MB."""

    def case(megabytes: int, where: int, is_nested: bool) -> Case:
        text = "12 " * (megabytes * 350_000)
        value = [{"role": "user", "content": text}] if is_nested else text
        rows = [*ROWS[:where], {**ROWS[0], "prompt": value}, *ROWS[where:]]
        return Case(("check", "{dir}/rows.py"), {"rows.jsonl": _as_lines(rows)}, ("rows.jsonl",))

    return st.builds(case, st.sampled_from((15, 20, 60)), st.integers(0, 3), st.booleans())


KINDS: dict[str, Callable[[], st.SearchStrategy[Case]]] = {
    "plan file": _plans,
    "cluster file": _clusters,
    "profile file": _profiles,
    "layout text": _layouts,
    "dataset lines": _datasets,
    "override": _overrides,
    "model config": _configs,
    "experiment field": _experiments,
    "checkpoint manifest": _manifests,
    "checkpoint file": _checkpoint_files,
    "weights": _weights,
    "tokenizer": _tokenizers,
    "parquet": _parquet,
    "special file": _special_files,
    "long row": _long_rows,
}
"""Kind of input -> a function that makes the strategy that draws its cases."""
