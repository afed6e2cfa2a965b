"""Python values in the form that JSON keeps, so that they are the same on every rank, moved or not."""

import json
from collections.abc import Mapping
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

_AS_TEXT = {datetime: "isoformat", date: "isoformat", time: "isoformat", Decimal: "__str__", UUID: "__str__"}
"""What parquet files hold beyond JSON, and the method that writes it as text."""


def json_form(value: Any) -> Any:
    """Return a copy in JSON's form: tuples become lists, numbers of numpy and torch become Python's.

    Raises TypeError that names the type of a value that JSON cannot hold.
    """
    if value is None or type(value) in (str, bool, int, float):
        return value
    if isinstance(value, Mapping):
        if other := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"a dict with the key {other[0]!r}: keys must be text")
        return {str(key): json_form(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [json_form(part) for part in value]
    if isinstance(value, str | int | float):  # Subclasses, such as members of an enumeration.
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
