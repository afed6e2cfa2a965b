"""Equal programs: ranks compare what each has compiled, because differences would make messages hang."""

import dataclasses
import hashlib
import json
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from realhf.distributed.group import name_ranks
from realhf.distributed.world import World
from realhf.errors import UserError
from realhf.graph import FunctionCall
from realhf.runtime.compile.actions import Action, Ask
from realhf.runtime.compile.program import Program, leaves, to_json

_HINTS = {
    "plan": "write one with `realhf plan -o plan.yaml` and give it to all by --plan",
    "experiment": "give all ranks the same experiment file, options and models",
    "compiled program": "install the same version of realhf on all hosts",
}
_MAX_VALUE = 80


def require_equal_programs(world: World, program: Program) -> None:
    """Raise UserError if ranks have different plans, experiments, programs, or commits of the hub's files.

    Absolute paths may differ, as hosts may keep the same files in different places.
    """
    documents = {
        "plan": program.plan.to_dict(),
        "experiment": _experiment(program),
        "compiled program": _actions(program),
    }
    digests = world.control.all_gather_json({what: _digest(made) for what, made in documents.items()})
    for what, document in documents.items():
        if others := [rank for rank, theirs in enumerate(digests) if theirs[what] != digests[0][what]]:
            both = world.control.all_gather_json(document if world.rank in (0, others[0]) else None)
            change = _first_difference(both[0], both[others[0]], rank=others[0])
            raise UserError(
                f"{name_ranks(others)} {'has' if len(others) == 1 else 'have'} another {what} than rank 0: "
                f"{change}; {_HINTS[what]}")
    _require_equal_commits(world, program)


def require_equal_schedules(world: World, digests: Mapping[str, str]) -> None:
    """Raise UserError if two ranks have made different schedules for a reallocation.

    `digests` maps the name of each reallocation of this rank to its schedule's digest. Every rank calls this.
    """
    first: dict[str, tuple[int, str]] = {}
    for rank, theirs in enumerate(world.control.all_gather_json(dict(digests))):
        for name, digest in theirs.items():
            first_rank, first_digest = first.setdefault(name, (rank, digest))
            if first_digest != digest:
                raise UserError(
                    f"ranks {first_rank} and {rank} have different schedules for the reallocation of {name}: "
                    "install the same versions of realhf and numpy on all hosts")


def _require_equal_commits(world: World, program: Program) -> None:
    commits = world.control.all_gather_json(program.experiment.hub_commits())
    for rank, theirs in enumerate(commits):
        if other := [name for name in theirs if theirs[name] != commits[0].get(name)]:
            name = other[0]
            both = f"{commits[0].get(name)} on rank 0 and {theirs[name]} on rank {rank}"
            hint = f"name one of them, as in {name.partition('@')[0]}@{theirs[name]}"
            if (field := name.partition(" ")[0]) != name:
                hint = f"set revision of {field} to one of them"
            raise UserError(f"the hosts' caches have different commits of {name}, {both}: {hint}")


def _experiment(program: Program) -> dict[str, Any]:
    """Return the fields of the experiment and of its models' configs as JSON, without absolute paths."""
    configs = {name: to_json(role.config()) for name, role in program.roles.items()}
    return _without_paths(to_json(program.experiment) | {"models": configs})


def _without_paths(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_paths(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_without_paths(part) for part in value]
    return "a path" if isinstance(value, str) and value.startswith(("/", "~")) else value


def _actions(program: Program) -> dict[str, Any]:
    """Return the actions of all parts and evaluations in words, by part and number."""
    lists: dict[str, Sequence[Action]] = dict(program.parts)
    lists |= {f"evaluation {eval_set.field}": eval_set.actions for eval_set in program.evaluations}
    return {part: {str(i): _in_words(action) for i, action in enumerate(actions)}
            for part, actions in lists.items()}


def _in_words(value: Any) -> str:
    if isinstance(value, FunctionCall):
        return value.name
    if isinstance(value, tuple):
        return f"({', '.join(map(_in_words, value))})"
    if isinstance(value, Action | Ask):
        parts = [f"{field.name} {_in_words(getattr(value, field.name))}"
                 for field in dataclasses.fields(value)]
        return f"{type(value).__name__} {', '.join(parts)}"
    return str(value)


def _digest(document: Any) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]


def _first_difference(first: dict[str, Any], other: dict[str, Any], *, rank: int) -> str:
    """Return the first field in which two documents differ, with both values."""
    flat = [dict(leaves(document)) for document in (first, other)]
    names = dict.fromkeys((*flat[0], *flat[1]))
    name = next(name for name in names if flat[0].get(name) != flat[1].get(name))
    values = [textwrap.shorten(repr(fields.get(name)), _MAX_VALUE) for fields in flat]
    return f"{name} is {values[0]} on rank 0 and {values[1]} on rank {rank}"
