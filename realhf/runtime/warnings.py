"""What a person is warned of when a run begins: it may be meant, so that the run goes on."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from realhf.data.loader import Loader
from realhf.engine.protocol import DTYPES
from realhf.engine.work import Generate
from realhf.experiment import Role
from realhf.graph import DataflowGraph
from realhf.model_config import ModelConfig
from realhf.nn.narrow import lacks_units
from realhf.nn.peft import CONFIG_FILE
from realhf.runtime.check import Program
from realhf.runtime.export import base_name, hub_name
from realhf.transformers_config import TransformersConfig


def warnings_of(
    program: Program, loader: Loader | None, eval_loader: Loader | None, *, device: torch.device
) -> list[str]:
    """One sentence each."""
    parts = [("dataset", program.graph, loader)]
    if program.eval_graph is not None:
        parts.append(("eval_dataset", program.eval_graph, eval_loader))
    found = [*other_bases(program.roles), *_greedy(program), *_slow(program.roles, device)]
    for name, graph, rows in parts:
        found += _ignored(program.roles, graph)
        if rows is not None:
            found += [*_left_out(name, rows), *_beyond_positions(program.roles, graph, name, rows)]
    return list(dict.fromkeys(found))


def other_bases(roles: Mapping[str, Role]) -> list[str]:
    """Adapters that seem to be made for another model than the one that a role has. Paths differ between
    machines, so that only their last parts are compared."""
    found: dict[tuple[str, str], str] = {}  # By adapters and model, which several roles may have.
    for name, role in roles.items():
        if role.random_init or role.lora is None or role.lora.adapter is None:
            continue
        adapter, ours = role.lora.adapter, base_name(role)
        theirs = json.loads((Path(adapter) / CONFIG_FILE).read_text()).get("base_model_name_or_path")
        if not isinstance(theirs, str) or not theirs:
            continue
        names = {Path(ours).name, Path(role.model).name}  # (A link may have another name.)
        if Path(hub_name(Path(theirs)) or theirs).name not in names:
            what = f"{name}.lora.adapter {adapter} was made for {theirs}, but {name}.model is {ours}"
            found.setdefault((adapter, ours), what)
    return list(found.values())


def _slow(roles: Mapping[str, Role], device: torch.device) -> Iterator[str]:
    """Yield dtypes in which this CPU is slow and transformers' classes compute all the same."""
    for name, role in roles.items():
        weight = torch.empty(0, dtype=DTYPES[role.dtype], device=device)
        if role.engine == "transformers" and lacks_units(weight):
            yield (
                f"{name}.dtype is {role.dtype}, for which this CPU has no units: with engine transformers it"
                " takes many times as long as float32 (the native engine computes in float32 by itself)")


def _ignored(roles: Mapping[str, Role], graph: DataflowGraph) -> Iterator[str]:
    """Settings of generation that only the native engine has."""
    for call in graph.calls:
        work = call.work
        if not isinstance(work, Generate) or call.role is None or roles[call.role].engine == "native":
            continue
        names = ("kv_cache_gib", "prefill_tokens", "work_stealing", "cuda_graphs")
        if changed := [name for name in names if getattr(work, name) != getattr(Generate, name)]:
            yield f"{call.role}.engine is transformers, which does not have {' and '.join(changed)}"


def _left_out(name: str, rows: Loader) -> Iterator[str]:
    if count := rows.num_too_long:
        of_all, limit = f"{count} of {len(rows) + count} rows", rows.max_prompt_tokens
        yield f"{name}: {of_all} are left out, as their prompts are longer than max_prompt_tokens {limit}"


def _greedy(program: Program) -> Iterator[str]:
    works, count = [call.work for call in program.graph.calls], program.experiment.group_size
    if count > 1 and any(isinstance(work, Generate) and work.sampling.temperature == 0 for work in works):
        yield f"sampling.temperature is 0: the {count} samples of a prompt are all the same"


def _beyond_positions(
    roles: Mapping[str, Role], graph: DataflowGraph, name: str, rows: Loader
) -> Iterator[str]:
    """Of models that can compute more positions than they were made for; others refuse them."""
    works = [call.work for call in graph.calls]
    new = max((work.sampling.max_new_tokens for work in works if isinstance(work, Generate)), default=0)
    for role in sorted({call.role for call in graph.calls if call.role is not None}):
        limit = _positions(roles[role].config())
        if limit is not None and rows.longest + new > limit:
            yield (
                f"{role}.model was made for {limit} positions (max_position_embeddings), but a sequence may"
                f" have {rows.longest + new}: {rows.longest} from {name} and sampling.max_new_tokens {new}")


def _positions(config: ModelConfig) -> int | None:
    """For which a model with rotary positions was made, stretched ones included; None where nobody knows."""
    limit, is_known = config.hf.get("max_position_embeddings"), True
    if isinstance(config, TransformersConfig):
        is_known = config.has_table
    if not is_known or config.positions != "rope" or not isinstance(limit, int):
        return None
    key, limits = "original_max_position_embeddings", [limit]
    for rope in config.rope_kinds().values():
        limits.append(int((rope.get(key) or config.hf.get(key) or limit) * float(rope.get("factor") or 1)))
    return max(limits)
