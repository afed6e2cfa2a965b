"""Warnings at the start of a run, about settings that are legal but often mistakes. Free of torch."""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields, is_dataclass
from fnmatch import fnmatch
from itertools import compress, islice
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from realhf.calls import (
    Generate,
    HostFunction,
    Loss,
    OptimizerConfig,
    SamplingConfig,
    TrainStep,
    default_rates,
    longest_response,
    response_keys,
)
from realhf.checkpoint.peft import CONFIG_FILE
from realhf.checkpoint.tensor_files import INDEX, SCORE, SINGLE, has_two_sets, open_checkpoint
from realhf.data.dataset import DATASET_ROW, LOADER_KEYS, column_of, reads_pairs
from realhf.data.light_tokenizer import (
    chat_template_of,
    files_of_templates,
    normalized,
    special_tokens,
)
from realhf.data.rows import extra_columns, first_rows
from realhf.data.sequence_tokens import end_of_turn, missing_beginning, special_texts, spelled_end
from realhf.data.tokenized import Compared, MixedRows, TokenizedRows
from realhf.experiment import Experiment, Role, named_sets
from realhf.graph import DataflowGraph
from realhf.models.families import KNOWN_FIELDS, misspelt
from realhf.models.model_config import ModelConfig, TransformersConfig
from realhf.runtime.compile.actions import spec_of
from realhf.runtime.compile.checks import unknown_turn_end
from realhf.runtime.compile.program import Program, leaves, to_json
from realhf.runtime.compile.step_trial import growing_pools
from realhf.user_input.field_types import unused
from realhf.user_input.files import code_fingerprints, content_sample, read_object
from realhf.user_input.hub import cached_name, find_model

_ANSWERS = ("answer", "answers", "ground_truth", "solution", "target", "label", "reference")
"""Usual names of columns with right answers."""
_PART_OF = re.compile(r"(?P<head>.*)-(?P<number>\d{5})-of-(?P<total>\d{5})\.\w+")
"""The name of one of several files, as the library `datasets` gives it."""
_SPLITS = {
    "training": {"train", "training"},
    "held-out": {"test", "testing", "validation", "valid", "val", "dev", "eval", "heldout"}}
_WHOLE_FLOAT = re.compile(r"-?\d+\.0")
_TOKENS = ("prompt_ids", "sequence_ids")
_NO_CONTENT = ("prompt", "response_mask", DATASET_ROW)
"""Columns by which rows are not compared: they follow from the tokens, or every row has its own number."""
_FEW_ROWS = 5
_MANY_ROWS = 20
"""Fewer rows are a trial, and may be the same."""
_SMALL_MODEL = 10_000_000  # Parameters.
_HIGH_RATE = 50
"""So many times the usual learning rate is too much for a pretrained model."""
_HIGHEST_RATE = 0.03
"""Too high a learning rate for any model (with Adam a weight changes by nearly that much in a step)."""
_LOW_RATE = 1e4
"""The usual learning rate divided by this hardly changes a model."""
_LOW_GRAD_NORM = 1e-3
_HIGH_KL = 1.0
_HIGH_ENTROPY = 0.1
_OF_EVALUATIONS = {"eval_every": 0, "eval_at_start": True}
"""Settings of evaluations, which do nothing without held-out rows, and their defaults."""
_LOW_TOP_P = 1e-5
"""So low a top_p draws one token only, as the most probable one has at least the share 1 / vocabulary."""
_ESCAPE = re.compile(r"\\([ntr])(?![A-Za-z])")
"""A backslash and a letter, not the beginning of a word of LaTeX such as `\\nabla`."""
_CHANGES_LOGITS = (
    "logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty", "bad_words", "bad_word_ids",
    "min_new_tokens")
"""Settings by which samples are drawn from another distribution than the model's."""
_HIGH_TEMPERATURE = 2.5
_LOW_TEMPERATURE = 0.05
_SCHEDULE = (
    "steps", "eval_every", "eval_at_start", "export_every", "checkpoint_every", "keep_checkpoints",
    "keep_checkpoint_every", "log_every", "expected", "rollouts")
"""Fields that a resumed run may change without training another model."""


@runtime_checkable
class ScoredByRewards(Protocol):
    """A host function that calls reward functions."""

    def unseen(self, special_tokens: Sequence[str]) -> Iterator[str]: ...

    def doubts(self, prompt: str) -> Iterator[str]: ...

    def unescaped(self) -> Iterator[str]: ...

    def unstable(self) -> Iterator[str]: ...

    def misspelt(self, columns: Sequence[str]) -> Iterator[str]: ...


@runtime_checkable
class _ShapingByLength(Protocol):
    """A shaping that knows whether answers of at most `longest` tokens are too short for it."""

    def doubt(self, longest: int) -> str | None: ...


@runtime_checkable
class _LossOfRows(Protocol):
    """A loss that knows what seems wrong with the columns that it reads."""

    def doubts(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]: ...


def warnings_of(
    program: Program, rows: TokenizedRows | MixedRows | None,
    held_out: Mapping[str, TokenizedRows | MixedRows | None],
) -> list[str]:
    """Return warnings, one sentence each; `rows` are a whole dataset, or in `realhf check` a sample of it.

    `held_out` has the rows of each held-out set by its name.
    """
    parts = [("dataset", program.graph, rows)]
    sets = program.evaluations
    parts += [(eval_set.field, eval_set.graph, held_out.get(eval_set.name)) for eval_set in sets]
    warnings = [*other_bases(program.roles), *_unread_weights(program), *_untrained_scores(program)]
    warnings += [*_doubled_weights(program.roles), *_contrary_fields(program)]
    warnings += _misspelt_fields(program)
    if rows is not None and any(part.num_chats for part in rows.parts):
        warnings += [*_two_templates(program.experiment.tokenizer_dir()), *_other_templates(program)]
    warnings += [*_greedy(program), *_idle_ranks(program), *_unevaluated(program)]
    warnings += _no_rollouts(program)
    warnings += _off_policy(program.graph)
    if program.parts:  # The program trains.
        warnings += [*program.experiment.doubts(), *_unchanged_graph(program)]
        if program.experiment.has_own_program:
            warnings += growing_pools(program.experiment, program.graph)
        warnings += [*_unusual_training(program), *_unweighted(program.graph)]
        warnings += [*_idle_shaping(program)]
    warnings += _faulty_rewards(program)
    warnings += [*_written_escapes(program), *_unlike_training(program)]
    if rows is not None and program.parts:
        warnings += [*_repeated_rows(program, rows), *_equal_rows(rows)]
        warnings += _doubted_losses(program.graph, rows)
        for eval_set in sets:
            if (of_set := held_out.get(eval_set.name)) is not None:
                warnings += _shared_rows(eval_set.field, of_set, rows)
                warnings += _other_prompts(eval_set.field, of_set, rows)
                warnings += _unmapped_rows(eval_set.field, of_set, rows)
                warnings += _sorted_file(eval_set.field, of_set, rows)
    warnings += _plain_texts([named for name, _, read in parts for named in named_parts(name, read)])
    for name, graph, read in parts:
        tokenizer = program.experiment.tokenizer_dir()
        warnings += [*_ignored(program.roles, graph), *_endless(program.roles, graph)]
        warnings += _turn_ends(graph, program.roles, tokenizer)
        for where, part in named_parts(name, read):
            warnings += _mixed_types(where, part)
            warnings += [*_left_out(where, part), *_null_columns(where, part), *_unlike_template(where, part)]
            warnings += [*_missing_parts(where, part), *_mixed_splits(where, part)]
            warnings += [*_equal_pairs(where, part), *_contradictions(where, graph, part)]
            warnings += [*_contrary_answers(where, part), *_whole_floats(where, part)]
            warnings += [*_lost_characters(where, part), *_ordinary_ends(program.roles, graph, part)]
            warnings += _other_ends(program.roles, graph, where, part, tokenizer=tokenizer)
            warnings += _unknown_text(where, part)
            warnings += [*_doubtful_rows(where, part), *_unused_settings(where, part)]
            warnings += [*_doubted_rewards(graph, where, part), *_blank_answers(where, part)]
            warnings += [*_beyond_positions(program.roles, graph, where, part),
                      *_unknown_end(program.roles, graph, where, part, tokenizer=tokenizer)]
    return list(dict.fromkeys(warnings))


def _unchanged_graph(program: Program) -> Iterator[str]:
    """Yield a warning if a user's `graph` returns what the class below returns."""
    kind = type(program.experiment)
    below: Any = next((base for base in kind.__mro__[1:] if "graph" in vars(base)), None)
    if "graph" not in vars(kind) or below is None or kind.__module__.startswith("realhf."):
        return
    if below is not Experiment and _is_same(program.experiment.graph(), below.graph(program.experiment)):
        yield (
            f"{kind.__name__}.graph() returns the same graph as {below.__name__}.graph(): a graph never "
            "changes, so return what graph.replace(...) or graph.add(...) returns")


def _is_same(a: Any, b: Any) -> bool:
    """Return whether two values are equal, or objects of one class of this package with equal attributes."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_is_same, a, b))
    is_ours = type(a).__module__.startswith("realhf.") and type(a) is type(b)
    if is_ours and hasattr(a, "__dict__"):
        names = [field.name for field in fields(a)] if is_dataclass(a) else vars(a)
        names = [name for name in names if not name.startswith("_")]
        return all(_is_same(getattr(a, name), getattr(b, name, None)) for name in names)
    return bool(a is b or a == b)


def _no_rollouts(program: Program) -> Iterator[str]:
    """Yield a warning if answers are to be kept, and it is not clear which of the calls has them."""
    generating = [call.name for call in program.graph.of_kind("generate")]
    if program.experiment.rollouts.is_on and generating and response_keys(program.graph) is None:
        yield (
            f"rollouts are not kept: {' and '.join(generating)} generate, and no call writes response_mask, "
            "which says what of sequence_ids is the answer")


def named_parts(name: str, rows: TokenizedRows | MixedRows | None) -> list[tuple[str, TokenizedRows]]:
    """Return the rows of each part of a data set, with its name for messages."""
    parts = () if rows is None else rows.parts
    return [(name if len(parts) == 1 else f"{name}.parts[{i}]", part) for i, part in enumerate(parts)]


def changed_fields(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a warning that names the changed fields of a resumed experiment, if there are any."""
    flat = [dict(leaves(fields)) for fields in (before, now)]
    changes = [
        f"{name} was {flat[0].get(name)!r} and is {flat[1].get(name)!r}"
        for name in dict.fromkeys((*flat[0], *flat[1]))
        if name.partition(".")[0] not in _SCHEDULE and flat[0].get(name) != flat[1].get(name)
    ]
    return [f"the run continues as another experiment: {', '.join(changes)}"] if changes else []


def changed_files(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a warning for each file of rows that has changed since a checkpoint was saved.

    Files are compared by what they hold, and not by their names: they may have moved.
    """
    warnings = []
    for name in before.keys() & now.keys():
        for was, is_now in zip(before[name], now[name], strict=False):
            if was["crc32"] == is_now["crc32"] and was["bytes"] == is_now["bytes"]:
                continue
            rows = f"it had {was['rows']} rows and has {is_now['rows']}"
            if was["rows"] == is_now["rows"]:
                rows = f"its {is_now['rows']} rows are not those that it had"
            warnings.append(
                f"{name}: {is_now['file']} has changed since the checkpoint was saved: {rows}, so the run "
                "does not go on as it would have")
    return sorted(warnings)


def sources_of(program: Program) -> dict[str, Any]:
    """Return the fingerprints of the code and of the model files on which a run depends, as JSON.

    A role's files count if their weights stay in use: those of a model that is trained as a whole are in the
    checkpoints.
    """
    models = {}
    for name, role in program.roles.items():
        if role.random_init or role.follows is not None:
            continue
        if role.optimizer is None or role.lora is not None:
            paths = sorted(role.model_path().glob("*.safetensors"))
            lora = role.resolved_lora()
            if role.optimizer is None and lora is not None and lora.adapter is not None:
                paths += sorted(Path(lora.adapter).glob("*.safetensors"))
            models[name] = [[path.name, content_sample(path)] for path in paths]
    return {"code": code_fingerprints(), "models": models}


def changed_sources(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a warning for each Python file and each model that has changed since a checkpoint was saved."""
    warnings = []
    for file, was in before.get("code", {}).items():
        is_now = now["code"].get(file)
        if is_now is None or was == is_now:
            continue
        names = [name for name in dict.fromkeys((*was, *is_now)) if was.get(name) != is_now.get(name)]
        warnings.append(
            f"{file} has changed since the checkpoint was saved ({', '.join(names[:5])}"
            f"{', ...' if len(names) > 5 else ''}): the run goes on with the new code")
    for role, was in before.get("models", {}).items():
        is_now = now["models"].get(role)
        if is_now is not None and was != is_now:
            warnings.append(
                f"{role}.model: the weights in its files have changed since the checkpoint was saved: the "
                f"run goes on with another {role} than it began with")
    return warnings


def other_bases(roles: Mapping[str, Role]) -> list[str]:
    """Return warnings about adapters that seem to be made for another model than their role's.

    Only the last parts of paths are compared, as paths differ between machines.
    """
    warnings: dict[tuple[str, str], str] = {}  # By adapters and model, as several roles may share both.
    for name, role in roles.items():
        if role.random_init or role.lora is None or role.lora.adapter is None:
            continue
        adapter = role.lora.adapter
        ours = role.base_name()
        settings = read_object(find_model(adapter) / CONFIG_FILE)
        theirs = settings.get("base_model_name_or_path")
        if not isinstance(theirs, str) or not theirs:
            continue
        names = {Path(ours).name, Path(role.model).name}  # A symbolic link may have another name.
        if Path(cached_name(Path(theirs)) or theirs).name not in names:
            what = (
                f"{name}.lora.adapter {adapter} was made for {theirs}, but {name}.model is {ours}: give the "
                "model of that name, or leave the adapter out")
            warnings.setdefault((adapter, ours), what)
    return list(warnings.values())


def _doubled_weights(roles: Mapping[str, Role]) -> Iterator[str]:
    """Yield warnings about directories with the weights in one file and in parts."""
    for name, role in roles.items():
        if not role.random_init and has_two_sets(directory := role.model_path()):
            newest = max(directory.glob("*.safetensors"), key=lambda path: path.stat().st_mtime)
            newer = "" if newest.name == SINGLE else f", although {newest.name} is newer"
            yield (
                f"{name}.model {role.model} has its weights in {SINGLE} and in the parts that {INDEX} names: "
                f"{SINGLE} is read, as by transformers{newer}; delete those that are not meant")


def _contrary_fields(program: Program) -> Iterator[str]:
    """Yield warnings about fields of config.json that say the same thing in two ways."""
    given = program.experiment.roles()
    for name, role in program.roles.items():
        hf = role.config().hf
        scaling, parameters = (hf.get(key) or {} for key in ("rope_scaling", "rope_parameters"))
        theta = (scaling or parameters).get("rope_theta")
        pairs = [
            ("rope_parameters.rope_theta", theta, "rope_theta", hf.get("rope_theta")),
            *((f"rope_scaling.{key}", scaling[key], f"rope_parameters.{key}", parameters[key])
              for key in sorted(scaling.keys() & parameters.keys()))]
        if name in given and given[name].dtype is None:
            dtypes = [str(hf[key]).removeprefix("torch.") if hf.get(key) else None
                      for key in ("dtype", "torch_dtype")]
            pairs.append(("dtype", dtypes[0], "torch_dtype", dtypes[1]))
        for read, value, other, unread in pairs:
            if value and unread and value != unread:
                yield (
                    f"{name}.model {role.model}: config.json has {read} {json.dumps(value)} and {other} "
                    f"{json.dumps(unread)}: {read} is read; remove the one that is wrong")


def _misspelt_fields(program: Program) -> Iterator[str]:
    """Yield warnings about keys of models' files that nothing reads, and that a known one may be meant by."""
    directories = {f"{name}.model": role.model_path() for name, role in program.roles.items()}
    configs = [(role.model_path(), role.config()) for role in program.roles.values()]
    keys_of = {
        path: config.read_keys for path, config in configs if not isinstance(config, TransformersConfig)}
    directories |= {"tokenizer": Path(program.experiment.tokenizer_dir())}
    adapters = {name: role.lora.adapter for name, role in program.roles.items() if role.lora is not None}
    directories |= {f"{name}.lora.adapter": find_model(path) for name, path in adapters.items() if path}
    seen: set[Path] = set()
    for where, directory in directories.items():
        for file, known in KNOWN_FIELDS.items():
            path = directory / file if directory.is_dir() else directory
            if path.name != file or path in seen or not path.is_file():
                continue
            if file == "config.json" and path.parent not in keys_of:
                continue  # Only its class in transformers knows what it reads.
            seen.add(path)
            meant = known
            if file == "config.json":
                known, meant = known | keys_of[path.parent], keys_of[path.parent]
            for key, near in misspelt(read_object(path), known=known, meant=meant).items():
                yield f"{where}: {path} has {key!r}, which nothing reads (did you mean {near}?)"


def _two_templates(tokenizer: str) -> Iterator[str]:
    """Yield a warning about a tokenizer's directory that has different chat templates in two files."""
    (first, template), *others = [*files_of_templates(tokenizer).items()] or [("", "")]
    for file, other in others:
        if other.strip() != template.strip():
            yield (
                f"tokenizer {tokenizer} has a chat template in {first} and another in {file}: the former is "
                "read, as by transformers; remove the one that is not meant")


def _unread_weights(program: Program) -> Iterator[str]:
    """Yield warnings about models whose weights are drawn at random although they have some."""
    for name, role in program.roles.items():
        if role.random_init and any(role.model_path().glob("*.safetensors")):
            yield f"{name}.random_init is true: the weights in {name}.model {role.model} are not read"


def _untrained_scores(program: Program) -> Iterator[str]:
    """Yield warnings about frozen models that score, and whose score head is drawn at random."""
    trained = {call.role for call in program.graph.of_kind("train_step")}
    for name, role in program.roles.items():
        config = role.config()
        if name in trained or role.random_init or role.follows is not None or role.engine != "native":
            continue
        if config.head != "score" or (role.lora is not None and role.lora.adapter is not None):
            continue
        if SCORE in open_checkpoint(role.model_path(), spec_of(config)).missing:
            yield (
                f"{name}.model {role.model} has no trained score head ({SCORE}), and nothing trains it: "
                "its scores are random (a model that RewardModel or PairwiseRewardModel has trained has one)")


def _other_templates(program: Program) -> Iterator[str]:
    """Yield warnings about models with another chat template than the one that writes the chats."""
    ours = chat_template_of(program.experiment.tokenizer_dir())
    for name, role in program.roles.items():
        theirs = None if role.random_init else chat_template_of(str(role.model_path()))
        if ours is not None and theirs is not None and ours != theirs:
            yield (
                f"{name}.model {role.model} has another chat template than the tokenizer "
                f"{program.experiment.tokenizer_dir()}, by which the chats are written that it reads: take a "
                "model that has learned from chats in that form, or one tokenizer for both")


def _turn_ends(graph: DataflowGraph, roles: Mapping[str, Role], tokenizer: str) -> Iterator[str]:
    """Yield a warning for each model that is trained or answers and does not know how turns end."""
    calls = [*graph.of_kind("generate"), *graph.of_kind("train_step")]
    for name in sorted({call.role for call in calls if call.role is not None}):
        role = roles[name]
        end = unknown_turn_end(role, tokenizer) if role.head == "lm" else None
        if end is not None:
            ids = role.config().eos_token_ids
            stops = f"stops at {', '.join(map(str, ids))} (eos_token_id)" if ids else "has no eos_token_id"
            yield (
                f"{name}.model {stops}, but the chat template ends turns with the token {end[0]} ({end[1]}): "
                "answers end there, too, and exports name it in generation_config.json")


def _off_policy(graph: DataflowGraph) -> Iterator[str]:
    """Yield warnings about settings by which a model trains on samples of another distribution."""
    trained = {call.role for call in graph.of_kind("train_step")}
    for call in graph.of_kind("generate"):
        sampling = call.work_as(Generate).sampling
        plain = type(sampling)()
        changed = [name for name in _CHANGES_LOGITS if getattr(sampling, name) != getattr(plain, name)]
        if changed and sampling.temperature > 0 and call.role in trained:
            what = " and ".join(f"sampling.{name}" for name in changed)
            yield f"{what}: {call.role} trains on samples of another distribution than its log-probs tell"


def _ignored(roles: Mapping[str, Role], graph: DataflowGraph) -> Iterator[str]:
    """Yield warnings about settings of generation that only the native engine reads."""
    for call in graph.of_kind("generate"):
        if call.role is None or roles[call.role].engine != "transformers":
            continue
        names = ("kv_cache_gib", "prefill_tokens", "work_stealing", "cuda_graphs")
        if changed := [name for name in names if getattr(call.work, name) != getattr(Generate, name)]:
            yield f"{call.role}.engine is transformers, which does not have {' and '.join(changed)}"


def _left_out(name: str, rows: TokenizedRows) -> Iterator[str]:
    if count := rows.num_too_long:
        limit = f"max_prompt_tokens {rows.config.max_prompt_tokens}"
        yield f"{name}: {_share(count, rows)} are left out, as their prompts are longer than {limit}"
    if count := rows.num_long_completions:
        limit = f"max_completion_tokens {rows.config.max_completion_tokens}"
        yield f"{name}: {_share(count, rows)} are left out, as their completions are longer than {limit}"
    if count := rows.num_cut:
        yield f"{name}: {count} prompts or completions are cut, as they are longer than their limit"
    if count := rows.num_torn_chats:
        lost = "end, with which answers begin" if rows.config.too_long == "keep_start" else "beginning"
        yield (
            f"{name}: too_long {rows.config.too_long!r} also cuts what the template writes at the {lost}, "
            f"in {count} prompts: 'drop' leaves their rows out")


def _share(count: int, rows: TokenizedRows) -> str:
    """Return for example "3 of 100 rows"."""
    tried = "rows" if rows.num_tokenized == rows.num_in_file else "rows that were tried"
    return f"{count} of {rows.num_tokenized} {tried}"


def _null_columns(name: str, rows: TokenizedRows) -> Iterator[str]:
    """Yield warnings about columns that a call reads and that are null in some rows."""
    keys = (key for key in rows.keys if key not in LOADER_KEYS and column_of(key) not in rows.absent)
    for key in keys:
        if null := [i for i, row in enumerate(rows.rows) if row[key] is None]:
            yield (
                f"{name}: column {column_of(key)!r} is null in {len(null)} of {len(rows.rows)} rows, "
                f"first in {rows.place_of(null[0])}")


def _mixed_types(name: str, rows: TokenizedRows) -> Iterator[str]:
    """Yield warnings about columns that a call reads, with numbers in some rows and text in others."""
    kinds = {bool: "true or false", int: "numbers", float: "numbers", str: "text"}
    for key in (key for key in rows.keys if key not in LOADER_KEYS and column_of(key) not in rows.absent):
        of_rows = [kinds.get(type(row[key])) for row in rows.rows]
        counts = Counter(kind for kind in of_rows if kind is not None)
        if len(counts) > 1:
            (most, _), *_, (least, count) = counts.most_common()
            first = rows.place_of(of_rows.index(least))
            yield (
                f"{name}: column {column_of(key)!r} has {least} in {count} rows, first in {first}, and "
                f"{most} in others: functions get 3 and '3' as they are, which differ; write all in one way")


def _sorted_file(
    name: str, held_out: TokenizedRows | MixedRows, rows: TokenizedRows | MixedRows
) -> Iterator[str]:
    """Yield a warning if the held-out part of a file has one value of a column, and the rest others."""
    for part in held_out.parts:
        rest = [other for other in rows.parts if other.config.path == part.config.path]
        is_sample = any(other.num_tokenized < other.num_in_file for other in rest)
        if not rest or is_sample or len(part.rows) < _FEW_ROWS:
            continue
        trained = [row for other in rest for row in other.rows]
        for key in part.rows[0].keys() - {*LOADER_KEYS, *_NO_CONTENT, *_ANSWERS}:
            ours = {json.dumps(row[key]) for row in part.rows if isinstance(row[key], str | int)}
            theirs = [json.dumps(row.get(key)) for row in trained]
            if len(ours) == 1 and 1 <= len(set(theirs)) <= _FEW_ROWS and not ours & set(theirs):
                yield (
                    f"{name}: all {len(part.rows)} rows have {column_of(key)} {ours.pop()}, and no training "
                    "row of the same file has it: the file is sorted; shuffle it before it is split")


def _blank_answers(name: str, rows: TokenizedRows) -> Iterator[str]:
    """Yield warnings about columns of right answers that are read and have empty text in some rows."""
    for column in _ANSWERS:
        values = [row.get(column) for row in rows.rows]
        if blank := [i for i, value in enumerate(values) if isinstance(value, str) and not value.strip()]:
            yield (
                f"{name}: column {column!r} is empty in {len(blank)} of {len(values)} rows, "
                f"first in {rows.place_of(blank[0])}")


def _equal_rows(rows: TokenizedRows | MixedRows) -> Iterator[str]:
    """Yield a warning if most rows of a data set repeat others."""
    for name, part in named_parts("dataset", rows):
        repeated = len(part.rows) - len(set(_contents(part, part.rows[0].keys() - set(_NO_CONTENT))))
        if len(part.rows) >= _MANY_ROWS and 2 * repeated > len(part.rows):
            yield f"{name}: {repeated} of {len(part.rows)} rows are the same as an earlier one"


def _missing_parts(name: str, rows: TokenizedRows) -> Iterator[str]:
    """Yield warnings about files that are some of several, by their names, such as train-00000-of-00002."""
    found: dict[tuple[str, str], set[int]] = {}
    for file in _files_of_patterns(rows):
        if (match := _PART_OF.fullmatch(file)) is not None:
            found.setdefault((match["head"], match["total"]), set()).add(int(match["number"]))
    for (head, total), numbers in found.items():
        if missing := sorted(set(range(int(total))) - numbers):
            yield (
                f"{name}: {len(missing)} of the {int(total)} files {head}-*-of-{total} are not there, the "
                f"first {head}-{missing[0]:05}-of-{total}: a download seems to have stopped (or name those "
                "that are meant)")


def _mixed_splits(name: str, rows: TokenizedRows) -> Iterator[str]:
    """Yield a warning if a pattern takes files of training and of held-out rows, by their names."""
    firsts: dict[str, str] = {}
    constant = _words_of(" ".join(_paths(rows)))
    for file in _files_of_patterns(rows):
        kinds = [kind for kind, names in _SPLITS.items() if names & (_words_of(file) - constant)]
        if len(kinds) == 1:
            firsts.setdefault(kinds[0], file)
    if len(firsts) == len(_SPLITS):
        training, held_out = map(firsts.__getitem__, _SPLITS)
        yield (
            f"{name}: the pattern takes files of training rows ({training}) and of held-out ones "
            f"({held_out}): narrow it, such as train-*, or list the files if all are meant")


def _files_of_patterns(rows: TokenizedRows) -> list[str]:
    """Return the files that patterns of the path match which do not say which of several files to take."""
    patterns = [path for path in _paths(rows) if "*" in path and not re.search(r"[^*]-of-", path)]
    return [file for file in rows.files if any(fnmatch(file, pattern) for pattern in patterns)]


def _paths(rows: TokenizedRows) -> Sequence[str]:
    return (rows.config.path,) if isinstance(rows.config.path, str) else rows.config.path


def _words_of(path: str) -> set[str]:
    return set(re.split(r"[\W_\d]+", path.lower()))


def _contrary_answers(name: str, rows: TokenizedRows) -> Iterator[str]:
    """Yield warnings about prompts that have different right answers in different rows.

    Many rows of a game or an environment have the same prompt, and answers of their own.
    """
    if "sequence_ids" in rows.keys:
        return
    prompts = [rows.compared(i, "prompt") for i in range(len(rows.rows))]
    others = [key for key in rows.keys if key not in LOADER_KEYS and column_of(key) not in _ANSWERS]
    for key in (key for key in rows.keys if column_of(key) in _ANSWERS):
        first: dict[tuple[int, str], str] = {}
        contrary = []
        for i, row in enumerate(rows.rows):
            asked = prompts[i], json.dumps([row[other] for other in others], default=str)
            answer = " ".join(str(row[key]).split()).casefold()
            if first.setdefault(asked, answer) != answer:
                contrary.append(i)
        if contrary and 4 * len(set(prompts)) >= len(prompts):
            yield (
                f"{name}: {len(contrary)} rows have another {column_of(key)} than an earlier row with the "
                f"same prompt, first in {rows.place_of(contrary[0])}: the same completion seems right in one "
                "and wrong in the other")


def _whole_floats(name: str, rows: TokenizedRows) -> Iterator[str]:
    """Yield warnings about whole numbers that have become floats, because of gaps in a table's column."""
    for key in (key for key in rows.keys if key not in LOADER_KEYS):
        values = [row[key] for row in rows.rows if row[key] is not None]
        number = next((value for value in values if value), None)
        is_whole = all(isinstance(value, float) and value.is_integer() for value in values)
        is_text = all(isinstance(value, str) and _WHOLE_FLOAT.fullmatch(value.strip()) for value in values)
        has_gaps = len(values) < len(rows.rows)
        if len(set(map(str, values))) > 2 and ((is_whole and has_gaps) or (is_text and len(values) >= 20)):
            kind = "whole numbers as floats beside nulls" if is_whole else "whole numbers as floats in text"
            yield (
                f"{name}: column {column_of(key)!r} has {kind}, such as {number}, as tables write them if "
                f"some are missing: if completions are compared with its text, {float(number or 0):.0f} is "
                "wrong; a map function can make them whole")


def _lost_characters(name: str, rows: TokenizedRows) -> Iterator[str]:
    """Yield warnings about what the tokenizer changes in texts before it splits them."""
    texts = "".join(str(row["prompt"]) for row in rows.rows[:_MANY_ROWS])
    lost = {
        "capital letters": any(map(str.isupper, texts)) and normalized(rows.tokenizer, "A") == "a",
        "accents": not texts.isascii() and normalized(rows.tokenizer, "\u00e9") == "e",
        "line breaks": "\n" in texts.replace("\\n", "\n") and "\n" not in normalized(rows.tokenizer, "a\nb")}
    if words := [what for what, is_lost in lost.items() if is_lost]:
        yield (
            f"{name}: the tokenizer's normalizer (in tokenizer.json) removes {' and '.join(words)}: the "
            "model neither reads nor writes them, and rewards compare completions without them")


def _other_ends(
    roles: Mapping[str, Role], graph: DataflowGraph, name: str, rows: TokenizedRows, *, tokenizer: str
) -> Iterator[str]:
    """Yield a warning about texts in the form of the chat template that end in another way than its turns."""
    end = end_of_turn(tokenizer)
    eos = rows.tokenizer.eos_token_id
    trains = any(roles[call.role].head == "lm" for call in graph.of_kind("train_step") if call.role)
    if not trains or "response_mask" not in rows.keys or rows.num_chats or end is None or end[0] == eos:
        return
    others = [
        i for i, samples in enumerate(rows.samples)
        if end[1] in str(samples[0]["prompt"]) and any(
            end[0] not in sample["sequence_ids"][len(sample["prompt_ids"]):] for sample in samples)]
    if others:
        shown = rows.tokenizer.decode([eos])
        yield (
            f"{name}: in {len(others)} rows, first in {rows.place_of(others[0])}, the prompt is written in "
            f"the chat template's form, and the completion learns to end with {shown} instead of {end[1]}, "
            f"with which the template ends turns: end it with {end[1]}, or give rows of messages")


def _ordinary_ends(
    roles: Mapping[str, Role], graph: DataflowGraph, rows: TokenizedRows
) -> Iterator[str]:
    """Yield warnings about tokens that end answers and stand for ordinary text."""
    special = {*rows.tokenizer.added_tokens_decoder, rows.tokenizer.eos_token_id}
    generating = {call.role for call in graph.of_kind("generate") if call.role is not None}
    for name in sorted(generating):
        for token in roles[name].config().eos_token_ids:
            if token not in special and (text := rows.tokenizer.decode([token])):
                yield (
                    f"{name}.model stops at {token} (eos_token_id), which is {text!r}, an ordinary token: "
                    "every answer ends where it says that")


def _unmapped_rows(
    name: str, held_out: TokenizedRows | MixedRows, rows: TokenizedRows | MixedRows
) -> Iterator[str]:
    """Yield a warning about held-out rows that the map function of the training rows would change.

    A function that has been applied to rows in a file usually changes nothing if it is applied again.
    """
    change = rows.parts[0].config.map
    if change is None or any(part.config.map is not change for part in rows.parts):
        return
    for part in (part for part in held_out.parts if part.config.map is None):
        read = {part.config.prompt_key, *(column_of(key) for key in part.keys)}
        before = [*islice(first_rows(part.config), _MANY_ROWS)]
        try:
            after = [change(dict(row)) for row in deepcopy(before)]
        except (Exception, SystemExit):  # These rows have another form than the function expects.
            return
        changed = sorted({
            column for row, new in zip(before, after, strict=True) if isinstance(new, Mapping)
            for column in new if column in row and column in read and new[column] != row[column]})
        if changed:
            columns = " and ".join(map(repr, changed))
            yield (
                f"{name}: dataset has a map function, which would also change {columns} of this set's rows, "
                "and this set has none: give it map, too (a function that returns its row changes nothing)")


def _other_prompts(
    name: str, held_out: TokenizedRows | MixedRows, rows: TokenizedRows | MixedRows
) -> Iterator[str]:
    """Yield warnings about settings of chats that the training data have, and held-out rows lack."""
    for field in ("chat", "system_prompt", "tools", "tools_key", "chat_template_kwargs"):
        lacks = any(not getattr(part.config, field) for part in held_out.parts)
        if field == "chat":  # Rows of messages are chats without it.
            lacks = any(part.num_chats == 0 for part in held_out.parts)
            has = all(part.num_chats for part in rows.parts)
        else:
            has = all(getattr(part.config, field) for part in rows.parts)
        if has and lacks:
            what = "prompts of dataset are chats" if field == "chat" else f"{field} is given for dataset"
            but = "those of this set are text" if field == "chat" else "this set lacks it"
            yield f"{name}: {what}, and {but}, so that the model reads other prompts than it trains on"


def _shared_rows(
    name: str, held_out: TokenizedRows | MixedRows, rows: TokenizedRows | MixedRows
) -> Iterator[str]:
    """Yield a warning about held-out rows that are rows of the training data, too.

    Rows with the same prompt, and completion if they have one, count as the same. Where most rows have the
    same prompt, such as those of games, the columns that a call reads must be equal, too.
    """
    common = set.intersection(*(set(part.rows[0]) for part in (*rows.parts, *held_out.parts)))
    tokens = common.intersection(_TOKENS)
    prompts = [content for part in rows.parts for content in _contents(part, tokens)]
    keys = common.difference(_NO_CONTENT) if 2 * len(set(prompts)) <= len(prompts) else tokens
    trained = {content for part in rows.parts for content in _contents(part, keys)}
    for part in held_out.parts:
        shared = [i for i, content in enumerate(_contents(part, keys)) if content in trained]
        if shared:
            yield (
                f"{name}: {len(shared)} of {len(part.rows)} rows are rows of dataset, too, "
                f"first {part.file_place_of(shared[0])}: what is learned by heart counts as learned")
        elif "sequence_ids" not in common:
            asked = [row_set.compared(i, "question") for row_set in rows.parts
                     for i in range(len(row_set.rows))]
            is_told = 2 * len(set(asked)) > len(asked)
            again = [i for i in range(len(part.rows)) if part.compared(i, "question") in set(asked)]
            if again and is_told:
                yield (
                    f"{name}: in {len(again)} of {len(part.rows)} rows the user says what one says in "
                    f"dataset, first {part.file_place_of(again[0])}, beside other messages: what is learned "
                    "by heart counts as learned")


def _contents(rows: TokenizedRows, keys: Collection[str]) -> list[tuple[int, str]]:
    """Return for each row by what it is compared with others: its texts, white space aside, and the values
    under these keys that are no tokens."""
    others = sorted(set(keys).difference(_TOKENS))
    what: Compared = "row" if "sequence_ids" in keys else "prompt"
    return [
        (rows.compared(i, what), json.dumps([[sample[key] for key in others] for sample in samples]))
        for i, samples in enumerate(rows.samples)]


def _contradictions(name: str, graph: DataflowGraph, rows: TokenizedRows) -> Iterator[str]:
    """Yield warnings about answers that are both good and bad: pairs in both orders, or two labels of one."""
    if "sequence_ids" not in rows.keys or not graph.of_kind("train_step"):
        return
    contrary: list[int] = []
    judged: dict[Any, set[Any]] = {}
    for i, samples in enumerate(rows.samples):
        texts = [tuple(sample["sequence_ids"]) for sample in samples]
        verdict = json.dumps(samples[0].get("label")) if len(texts) == 1 else texts[0] < texts[1]
        verdicts = judged.setdefault(tuple(sorted(texts)), set())
        verdicts.add(verdict)
        if len(verdicts) > 1 and len(set(texts)) == len(texts):
            contrary.append(i)
    if contrary:
        what = "pairs have the same two completions as an earlier one, in the other order"
        if not reads_pairs(rows.keys):
            what = "answers have another label than the same answer to the same prompt earlier"
        yield f"{name}: {len(contrary)} {what}, first in {rows.place_of(contrary[0])}"


def _unusual_training(program: Program) -> Iterator[str]:
    """Yield warnings about settings of training with which a model hardly learns, or is soon destroyed."""
    for name, role in program.roles.items():
        trains = program.graph.works(TrainStep, role=name)
        if role.optimizer is not None and trains:
            yield from _unusual_rate(name, role, role.optimizer, trains[0].loss)
            num_steps = program.experiment.steps * sum(work.optimizer_steps for work in trains)
            yield from _unusual_optimizer(f"{name}.optimizer", role.optimizer, num_steps)
    if getattr(program.experiment, "ref", None) is not None and "ref" not in program.roles:
        yield "ref is given, and no call uses it: set loss.kl_coef above 0, or leave it out"
    for name, value in leaves(to_json(program.experiment)):
        if name.endswith("entropy_coef") and isinstance(value, int | float) and value > _HIGH_ENTROPY:
            yield f"{name} is {value:g}: the model learns to be random (0 to 0.01 is usual)"
        if name.rpartition(".")[2] == "kl_coef" and isinstance(value, int | float) and value >= _HIGH_KL:
            yield f"{name} is {value:g}: the reward hardly counts beside it (0 to 0.1 is usual)"


def _unusual_rate(name: str, role: Role, optimizer: OptimizerConfig, loss: Loss) -> Iterator[str]:
    """Yield warnings about a learning rate that is 0, or far from the usual one.

    Small models, and those with random weights, bear far higher rates than pretrained ones.
    """
    rates = default_rates(loss)
    usual = rates.full if role.lora is None else rates.lora
    assert optimizer.lr is not None, "roles are resolved"
    is_new = role.random_init or spec_of(role.config()).numel < _SMALL_MODEL
    limit = _HIGHEST_RATE if is_new else min(_HIGHEST_RATE, _HIGH_RATE * usual)
    known = f"above {_HIGHEST_RATE:g}, for any model" if is_new else f"{usual:g} is usual for what it learns"
    if optimizer.lr == 0:
        yield f"{name}.optimizer.lr is 0: the model does not change"
    elif optimizer.lr > limit:
        yield f"{name}.optimizer.lr is {optimizer.lr:g} ({known}): a few steps at such a rate destroy a model"
    elif optimizer.lr < usual / _LOW_RATE:
        yield f"{name}.optimizer.lr is {optimizer.lr:g} ({usual:g} is usual): the model hardly changes"


def _unusual_optimizer(name: str, optimizer: OptimizerConfig, num_steps: int) -> Iterator[str]:
    """Yield warnings about the other settings of an optimizer that takes `num_steps` steps."""
    if optimizer.warmup_steps > num_steps:
        yield (
            f"{name}.warmup_steps is {optimizer.warmup_steps}, and the run has {num_steps} optimizer steps: "
            "the learning rate never reaches lr")
    if optimizer.schedule != "constant" and optimizer.total_steps < num_steps:
        last = optimizer.min_lr_ratio * (optimizer.lr or 0.0)
        yield (
            f"{name}.total_steps is {optimizer.total_steps}, and the run has {num_steps} optimizer steps: "
            f"after {optimizer.total_steps} the learning rate is {last:g}")
    falls = (optimizer.schedule != "constant", "schedule is constant")
    yield from unused(optimizer, f"{name}.", min_lr_ratio=falls)
    if optimizer.betas[0] > optimizer.betas[1]:
        yield f"{name}.betas are {optimizer.betas}: the first is usually the smaller one, as in (0.9, 0.95)"
    if optimizer.weight_decay >= 1:
        yield f"{name}.weight_decay is {optimizer.weight_decay:g}: it shrinks the weights (0 to 0.1 is usual)"
    if optimizer.max_grad_norm < _LOW_GRAD_NORM:
        yield f"{name}.max_grad_norm is {optimizer.max_grad_norm:g}: every gradient is cut to nearly nothing"


def _unweighted(graph: DataflowGraph) -> Iterator[str]:
    """Yield a warning if all reward functions have the weight 0."""
    for call in graph.of_kind("host"):
        rewards = getattr(call.work_as(HostFunction).function, "rewards", ())
        if rewards and all(reward.weight == 0 for reward in rewards):
            yield f"call {call.name}: every reward has the weight 0, so every answer has the score 0"


_ODDITIES = {
    "num_unlike_prompt": (
        "in {} rows the chat template writes another beginning with the completion than for the prompt "
        "alone; the loss counts from the first token that differs"),
    "num_rewritten": (
        "in {} rows the chat template writes answers in another way when messages follow (many leave out "
        "earlier reasoning); the model learns what the whole chat has"),
    "num_torn": (
        "in {} rows a token would span the end of the prompt and the beginning of the completion, as after a "
        "space at the end: they are tokenised apart, as answers are drawn"),
    "num_special": (
        "in {} rows messages have special tokens in what they say, which the model reads as if the chat "
        "template had written them"),
    "num_left_out": (
        "in {} rows the chat template does not write all that messages say: it may not know a role, or "
        "content that is a list of parts"),
    "num_lists": (
        "in {} rows the chat template writes the list of a message's parts as Python shows it, because it "
        "only knows content that is text: give that"),
    "num_thoughtless": (
        "in {} rows the chat template does not write the reasoning of the last answer (in <think> tags, or "
        "in a key of its own), so that it is not learned: change the template, or leave the reasoning out"),
    "num_quoted": (
        "in {} rows the arguments of tool calls are JSON text, which the chat template quotes once more: "
        "store them as objects"),
    "num_questions": (
        "{} rows are whole conversations: their prompts are the messages up to the user's last one, and the "
        "answers in the rows are not read"),
    "num_continued": (
        "{} prompts end with a message of the assistant, which answers continue: leave it out if it is an "
        "answer by itself"),
}
"""Count of rows whose tokens are not what one may expect -> the warning about it."""


def _unlike_template(name: str, rows: TokenizedRows) -> Iterator[str]:
    """Yield warnings about rows whose tokens are not what one may expect."""
    for field, sentence in _ODDITIES.items():
        if count := getattr(rows.oddities, field):
            yield f"{name}: {sentence.format(count)}"
    for key, count in rows.oddities.unread.items():
        yield (
            f"{name}: in {count} rows messages have the key {key!r}, which nothing reads, the chat template "
            "included: it changes nothing")


def _doubtful_rows(name: str, rows: TokenizedRows) -> Iterator[str]:
    """Yield warnings about rows that are seldom meant."""
    for doubt, numbers in rows.doubtful.rows.items():
        yield f"{name}: in {len(numbers)} rows, first in {rows.place_of_number(numbers[0])}, {doubt}"


def _unused_settings(name: str, rows: TokenizedRows) -> Iterator[str]:
    """Yield warnings about settings of chats that change nothing, and a template that begins no answer."""
    config = rows.config
    chats = rows.num_chats
    if not chats:
        return
    template = rows.tokenizer.get_chat_template(tools=list(config.tools) or None) or ""
    for setting, argument in [(f"chat_template_kwargs {key!r}", key) for key in config.chat_template_kwargs]:
        value = config.chat_template_kwargs[argument]
        if not re.search(rf"\b{re.escape(argument)}\b", template):
            yield f"{name}: {setting} changes nothing: the chat template does not read it"
        elif isinstance(value, str) and value.lower() in ("true", "false"):
            yield (
                f"{name}: {setting} is the text {value!r}, which a template takes for true: give "
                f"{value.capitalize()} without quotation marks")
    tools = "tools_key" if config.tools_key is not None else "tools" if config.tools else None
    if tools and rows.has_tools and not re.search(r"\btools\b", template):
        yield f"{name}: {tools} changes nothing: the chat template does not write tools"
    if config.system_prompt is not None and rows.num_own_systems == chats:
        yield f"{name}: system_prompt is never used: every prompt begins with a system message of its own"
    if (mark := spelled_end(rows.tokenizer, config.chat_template_kwargs)) is not None:
        size = len(rows.tokenizer.encode(mark, add_special_tokens=False))
        yield (
            f"{name}: the chat template ends turns with {mark}, no token of this tokenizer but {size} "
            "of them, so that no token ends an answer: the template seems to be another model's")
    if beginning := missing_beginning(rows.tokenizer, config.chat_template_kwargs):
        yield (
            f"{name}: the template ignores add_generation_prompt: prompts end before {beginning!r}, with "
            "which the model has to begin its answers by itself")


def _plain_texts(parts: list[tuple[str, TokenizedRows]]) -> Iterator[str]:
    """Yield a warning about data sets of text prompts, if the tokenizer has a template for chats."""
    names = [name for name, rows in parts if rows.config.chat is None and _has_plain_text(rows)]
    if names:
        yield (
            f"{' and '.join(dict.fromkeys(names))}: prompts are text, and the tokenizer has a chat template, "
            "which is not applied to them: chat=True makes chats of them, chat=False leaves them")


def _has_plain_text(rows: TokenizedRows) -> bool:
    """Return whether a prompt becomes no chat. Texts that a template has written have special tokens."""
    template = rows.tokenizer.chat_template
    if rows.config.makes_chats or template is None:
        return False
    prompts = [row["prompt"] for row in rows.rows if isinstance(row["prompt"], str)]
    specials = [text for text in special_texts(rows.tokenizer) if text in str(template)]
    return any(not any(text in prompt for text in specials) for prompt in prompts)


def _equal_pairs(name: str, rows: TokenizedRows) -> Iterator[str]:
    if equal := rows.equal_pairs():
        yield (
            f"{name}: {rows.config.rejected_key} is the same as {rows.config.chosen_key} in {len(equal)} of "
            f"{len(rows.rows)} rows, first in {rows.place_of(equal[0])}")


def _unknown_text(name: str, rows: TokenizedRows) -> Iterator[str]:
    if unknown := rows.unknown():
        yield (
            f"{name}: {len(unknown)} of {len(rows.rows)} rows have text that the tokenizer does not know, "
            f"first {rows.file_place_of(unknown[0])}: the model reads an unknown token")


def _doubted_rewards(graph: DataflowGraph, name: str, rows: TokenizedRows) -> Iterator[str]:
    """Yield warnings about rewards that look for what completions cannot have."""
    for function in (work.function for work in graph.works(HostFunction)):
        if isinstance(function, ScoredByRewards):
            yield from function.unseen(special_tokens(rows.tokenizer))
            prompt = rows.tokenizer.decode(rows.rows[0]["prompt_ids"])
            yield from (f"{name}: {sentence}" for sentence in function.doubts(prompt))


def _doubted_losses(graph: DataflowGraph, rows: TokenizedRows | MixedRows) -> Iterator[str]:
    """Yield warnings of losses about the columns that they read."""
    for loss in (work.loss for work in graph.works(TrainStep)):
        if isinstance(loss, _LossOfRows):
            doubts = loss.doubts([row for part in rows.parts for row in part.rows])
            yield from (f"dataset: {doubt}" for doubt in doubts)


def _repeated_rows(program: Program, rows: TokenizedRows | MixedRows) -> Iterator[str]:
    size = program.experiment.batch_size
    count = sum(part.num_in_file - part.num_left_out for part in rows.parts)
    if size > count:
        yield (
            f"batch_size is {size}, and there are {count} rows in dataset: "
            "each step has some rows more than once")


def _unevaluated(program: Program) -> Iterator[str]:
    """Yield a warning if nothing is computed for some held-out rows, or if there are settings and no rows."""
    experiment = program.experiment
    if experiment.eval_dataset is None and program.parts:
        given = [
            f"{name} is {value}" for name, default in _OF_EVALUATIONS.items()
            if (value := getattr(experiment, name)) != default]
        given += ["eval_function is given"] * (getattr(experiment, "eval_function", None) is not None)
        if given:
            yield f"{' and '.join(given)}, and there is no eval_dataset: nothing is evaluated"
    evaluated = {eval_set.name for eval_set in program.evaluations}
    if unused := [name for name in named_sets(program.experiment.eval_dataset) if name not in evaluated]:
        lacks_function = getattr(program.experiment, "eval_function", program) is None
        mend = "give eval_function, which scores the answers" if lacks_function else "define eval_graph()"
        which = "".join(f".{name}" for name in unused[:1] if name)
        yield f"eval_dataset{which} is given, and nothing evaluates it: {mend}"


def _idle_ranks(program: Program) -> Iterator[str]:
    parts = [(eval_set.graph, eval_set.plan) for eval_set in program.evaluations]
    parts += [(program.graph, program.plan)] if program.parts else []
    busy = {rank for graph, plan in parts for call in graph.calls for rank in plan[call.name].layout.ranks}
    if idle := [rank for rank in range(program.num_ranks) if rank not in busy]:
        which = f"rank {idle[0]} has" if len(idle) == 1 else f"{len(idle)} ranks ({_listed(idle)}) have"
        yield f"{which} no call in the plan and will do nothing, of {program.num_ranks} ranks"


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown}, ..." if len(ranks) > 8 else shown


def _endless(roles: Mapping[str, Role], graph: DataflowGraph) -> Iterator[str]:
    for call in graph.of_kind("generate"):
        sampling = call.work_as(Generate).sampling
        longest = sampling.max_new_tokens
        if sampling.min_new_tokens == longest and longest > 1:
            yield (
                f"sampling.min_new_tokens and max_new_tokens are both {longest}: no answer may end by "
                "itself, and all are cut at that length")
        has_stops = sampling.stop or sampling.stop_token_ids
        if call.role is not None and not has_stops and not roles[call.role].config().eos_token_ids:
            yield (
                f"{call.role}.model has no eos_token_id in config.json or generation_config.json: "
                f"every answer runs to sampling.max_new_tokens {longest}")


def _unknown_end(
    roles: Mapping[str, Role], graph: DataflowGraph, name: str, rows: TokenizedRows, *, tokenizer: str
) -> Iterator[str]:
    """Yield warnings about completions that end in a token at which the model's answers do not end."""
    if "response_mask" not in rows.keys:
        return
    for role in sorted({call.role for call in graph.calls if call.role is not None}):
        eos_ids = roles[role].config().eos_token_ids
        if (end := unknown_turn_end(roles[role], tokenizer)) is not None:
            eos_ids = (*eos_ids, end[0])
        ours = rows.tokenizer.eos_token_id
        last = [
            token for samples in rows.samples for sample in samples
            for token in list(compress(sample["sequence_ids"], sample["response_mask"]))[-4:]]
        ends = [token for token in last if token in eos_ids]
        if eos_ids and not ends:
            yield (
                f"{name}: no completion learns to end in one of the tokens {', '.join(map(str, eos_ids))}, "
                f"at which {role}.model stops (eos_token_id); the tokenizer's eos token is {ours}")


def _greedy(program: Program) -> Iterator[str]:
    count = program.experiment.group_size
    for sampling in (work.sampling for work in program.graph.works(Generate) if program.parts):
        if sampling.temperature > _HIGH_TEMPERATURE:
            yield (
                f"sampling.temperature is {sampling.temperature:g}: answers are nearly random tokens "
                "(0.6 to 1.2 is usual)")
        if count == 1:
            continue
        if (why := _one_token(sampling)) is not None:
            yield f"sampling.{why}: the {count} samples of a prompt are all the same"
        elif sampling.temperature < _LOW_TEMPERATURE:
            yield (
                f"sampling.temperature is {sampling.temperature:g}: the {count} samples of a prompt are "
                "nearly all the same")


def _one_token(sampling: SamplingConfig) -> str | None:
    """Return the setting by which only the most probable token is ever drawn, as words; None if there is
    none."""
    if sampling.temperature == 0:
        return "temperature is 0"
    if sampling.top_k == 1:
        return "top_k is 1"
    if sampling.min_p == 1:
        return "min_p is 1"
    return f"top_p is {sampling.top_p:g}" if sampling.top_p <= _LOW_TOP_P else None


def _written_escapes(program: Program) -> Iterator[str]:
    """Yield warnings about texts with a backslash and a letter where a line break or tab was surely meant."""
    for work in program.graph.works(Generate):
        for field in ("stop", "bad_words"):
            for text in getattr(work.sampling, field):
                if (found := _ESCAPE.search(text)) is not None:
                    yield (
                        f"sampling.{field} has {text!r}, a backslash and the letter {found[1]}: a line break "
                        f"or tab is \"\\{found[1]}\" in Python and $'\\{found[1]}' in a shell")


def _unlike_training(program: Program) -> Iterator[str]:
    """Yield warnings about evaluations whose own sampling lacks what ends answers in training, or in which
    the samples of a prompt are equal."""
    training = getattr(program.experiment, "sampling", None)
    if not isinstance(training, SamplingConfig):
        return
    default = SamplingConfig()
    sets = named_sets(program.experiment.eval_dataset)
    for name, eval_set in sets.items():
        sampling = eval_set.sampling
        field = f"eval_dataset.{name}.sampling" if name else "eval_dataset.sampling"
        drawn = training if sampling is None else sampling
        if eval_set.samples > 1 and (why := _one_token(drawn)) is not None:
            where = "sampling" if sampling is None else field
            yield f"{where}.{why}: the {eval_set.samples} samples of a held-out prompt are all the same"
        if sampling is None:
            continue
        lost = [
            key for key in ("max_new_tokens", "stop", "stop_token_ids")
            if getattr(sampling, key) == getattr(default, key) != getattr(training, key)]
        if lost:
            values = " and ".join(f"{key} {getattr(sampling, key)!r}" for key in lost)
            ours = " and ".join(f"{getattr(training, key)!r}" for key in lost)
            yield (
                f"{field} has {values} by default, and training has {ours}: it takes nothing from training's "
                "sampling, so say what both have")


def _idle_shaping(program: Program) -> Iterator[str]:
    """Yield warnings about shapings of rewards that concern longer answers than there can be."""
    experiment = program.experiment
    longest = longest_response(program.graph)
    for shaping in (getattr(experiment, "score_shaping", None), *getattr(experiment, "token_rewards", ())):
        if isinstance(shaping, _ShapingByLength) and (doubt := shaping.doubt(longest)) is not None:
            yield f"{doubt}, and sampling.max_new_tokens is {longest}"


def _faulty_rewards(program: Program) -> Iterator[str]:
    """Yield warnings about reward functions that ask for columns in vain, or whose values do not repeat."""
    for function in (work.function for work in program.graph.works(HostFunction)):
        if isinstance(function, ScoredByRewards):
            yield from function.unstable()
            yield from function.unescaped()
            yield from function.misspelt(extra_columns(program.experiment.dataset))


def _beyond_positions(
    roles: Mapping[str, Role], graph: DataflowGraph, name: str, rows: TokenizedRows
) -> Iterator[str]:
    """Yield warnings about sequences with more positions than a rotary model was made for."""
    new = longest_response(graph)
    for role in sorted({call.role for call in graph.calls if call.role is not None}):
        limit = _positions(roles[role].config())
        if limit is not None and rows.longest + new > limit:
            yield (
                f"{role}.model was made for {limit} positions (max_position_embeddings), but a sequence may"
                f" have {rows.longest + new}: {rows.longest} from {name} and sampling.max_new_tokens {new}")


def _positions(config: ModelConfig) -> int | None:
    """Return the number of positions for which a rotary model was made, scaling included; None if unknown."""
    limit = config.hf.get("max_position_embeddings")
    is_known = not isinstance(config, TransformersConfig) or config.has_table
    if not is_known or config.positions != "rope" or not isinstance(limit, int):
        return None
    key = "original_max_position_embeddings"
    limits = [limit]
    for rope in config.rope_kinds().values():
        limits.append(int((rope.get(key) or config.hf.get(key) or limit) * float(rope.get("factor") or 1)))
    return max(limits)
