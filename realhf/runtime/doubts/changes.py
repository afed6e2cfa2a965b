"""Doubts about a resumed run: what has changed since its checkpoint was saved."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from realhf.runtime.compile.program import Program, leaves
from realhf.user_input.files import code_fingerprints, content_sample

_SCHEDULE = (
    "steps", "eval_every", "eval_at_start", "export_every", "checkpoint_every", "keep_checkpoints",
    "keep_checkpoint_every", "log_every", "expected", "rollouts")
"""Fields that a resumed run may change without training another model."""


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
