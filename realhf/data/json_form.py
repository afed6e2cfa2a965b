"""Converts Python values to the types that JSON has, so that sending them to another rank changes nothing."""

import json
from collections.abc import Mapping
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

_AS_TEXT = {datetime: "isoformat", date: "isoformat", time: "isoformat", Decimal: "__str__", UUID: "__str__"}
"""Types of parquet files that JSON lacks, with the method that writes a value as text."""


def json_form(value: Any) -> Any:
    """Return a copy in JSON's types: tuples become lists, and numpy's and torch's numbers become Python's.

    Raises TypeError, which names the type, for a value that JSON cannot hold.
    """
    if value is None or type(value) in (str, bool, int, float):
        return value
    if isinstance(value, Mapping):
        if other := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"a dict with the key {other[0]!r}: keys must be text")
        return {str(key): json_form(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [json_form(part) for part in value]
    if isinstance(value, str | int | float):  # This is a subclass, such as an enumeration's.
        return json.loads(json.dumps(value))
    if hasattr(value, "tolist"):
        return json_form(value.tolist())
    raise TypeError(f"a value of type {type(value).__name__}")


def with_text(value: Any) -> Any:
    """Return the value with dates, times, decimal numbers and UUIDs written as text, at any depth."""
    if isinstance(value, Mapping):
        return {key: with_text(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [with_text(part) for part in value]
    for kind, method in _AS_TEXT.items():
        if isinstance(value, kind):
            return getattr(value, method)()
    return value
