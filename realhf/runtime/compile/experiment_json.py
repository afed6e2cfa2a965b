"""Describes experiments and roles as JSON. Free of torch."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from realhf.experiment import Experiment


def described(experiment: Experiment) -> dict[str, Any]:
    """Return the experiment's fields as JSON, and as `hub` the commits of models and data sets there."""
    commits = experiment.hub_commits()
    return to_json(experiment) | ({"hub": commits} if commits else {})


def to_json(config: Any) -> dict[str, Any]:
    """Return the fields of an experiment, or roles by name, as JSON; values that are no config are named."""

    def form(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__name__)}"

    return json.loads(json.dumps(config, default=form))


def leaves(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of every field that is not a mapping."""
    for name, value in fields.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
