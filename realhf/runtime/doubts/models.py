"""Doubts about the directories of models and adapters, and about models beside the tokenizer and the rows."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from realhf.calls import Generate, longest_response
from realhf.checkpoint.peft import CONFIG_FILE
from realhf.checkpoint.tensor_files import INDEX, SCORE, SINGLE, has_two_sets, open_checkpoint
from realhf.data.tokenized import TokenizedRows
from realhf.experiment import Role
from realhf.graph import DataflowGraph, FunctionCall
from realhf.models.families import KNOWN_FIELDS, misspelt
from realhf.models.model_config import ModelConfig, TransformersConfig
from realhf.runtime.compile.actions import spec_of
from realhf.runtime.compile.checks import unknown_turn_end
from realhf.runtime.compile.program import Program
from realhf.user_input.files import read_object
from realhf.user_input.hub import cached_name, find_model


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


def doubled_weights(roles: Mapping[str, Role]) -> Iterator[str]:
    """Yield warnings about directories with the weights in one file and in parts."""
    for name, role in roles.items():
        if not role.random_init and has_two_sets(directory := role.model_path()):
            newest = max(directory.glob("*.safetensors"), key=lambda path: path.stat().st_mtime)
            newer = "" if newest.name == SINGLE else f", although {newest.name} is newer"
            yield (
                f"{name}.model {role.model} has its weights in {SINGLE} and in the parts that {INDEX} names: "
                f"{SINGLE} is read, as by transformers{newer}; delete those that are not meant")


def contrary_fields(program: Program) -> Iterator[str]:
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


def misspelt_fields(program: Program) -> Iterator[str]:
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


def unread_weights(roles: Mapping[str, Role]) -> Iterator[str]:
    """Yield warnings about models whose weights are drawn at random although they have some."""
    for name, role in roles.items():
        if role.random_init and any(role.model_path().glob("*.safetensors")):
            yield f"{name}.random_init is true: the weights in {name}.model {role.model} are not read"


def untrained_scores(program: Program) -> Iterator[str]:
    """Yield warnings about frozen models that score, and whose score head is drawn at random."""
    trained = program.graph.roles("train_step")
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


def turn_ends(program: Program, graph: DataflowGraph) -> Iterator[str]:
    """Yield a warning for each model that is trained or answers and does not know how turns end."""
    tokenizer = program.experiment.tokenizer_dir()
    for name in sorted(program.roles.keys() & graph.roles("generate", "train_step")):
        role = program.roles[name]
        end = unknown_turn_end(role, tokenizer) if role.head == "lm" else None
        if end is not None:
            ids = role.config().eos_token_ids
            stops = f"stops at {', '.join(map(str, ids))} (eos_token_id)" if ids else "has no eos_token_id"
            yield (
                f"{name}.model {stops}, but the chat template ends turns with the token {end[0]} ({end[1]}): "
                "answers end there, too, and exports name it in generation_config.json")


def beyond_positions(
    program: Program, graph: DataflowGraph, name: str, rows: TokenizedRows
) -> Iterator[str]:
    """Yield warnings about sequences with more positions than a rotary model was made for."""
    new = longest_response(graph)
    in_turns = {call.role: call.work_as(Generate) for call in graph.of_kind("generate") if _is_played(call)}
    of_turn = max((work.sampling.max_new_tokens for work in in_turns.values()), default=new)
    setting = "sampling.max_new_tokens" if new == of_turn else "environment.max_tokens"
    for role in sorted(program.roles.keys() & graph.roles()):
        limit = _positions(program.roles[role].config())
        if limit is not None and rows.longest + new > limit:
            ends = "; its rollouts end with context_full before" if role in in_turns else ""
            yield (
                f"{role}.model was made for {limit} positions (max_position_embeddings), but a sequence may"
                f" have {rows.longest + new}: {rows.longest} from {name} and {setting} {new}{ends}")


def _is_played(call: FunctionCall) -> bool:
    return call.work_as(Generate).environment is not None


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
