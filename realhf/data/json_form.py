"""Converts Python values to the types that JSON has, so that sending them to another rank changes nothing."""

import json
from collections.abc import Mapping
from datetime import date, time
from decimal import Decimal
from typing import Any
from uuid import UUID


def json_form(value: Any, *, as_text: bool = False) -> Any:
    """Return a copy in JSON's types: tuples become lists, and numpy's and torch's numbers become Python's.

    With `as_text`, dates, times, decimal numbers and UUIDs become text. Raises TypeError, which names the
    type, for a value that JSON cannot hold.
    """
    if value is None or type(value) in (str, bool, int, float):
        return value
    if isinstance(value, Mapping):
        if other := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"a dict with the key {other[0]!r}: keys must be text")
        return {str(key): json_form(entry, as_text=as_text) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [json_form(entry, as_text=as_text) for entry in value]
    if isinstance(value, str | int | float):  # This is a subclass, such as an enumeration's.
        return json.loads(json.dumps(value))
    if hasattr(value, "tolist"):
        return json_form(value.tolist(), as_text=as_text)
    if as_text and isinstance(value, date | time):
        return value.isoformat()
    if as_text and isinstance(value, Decimal | UUID):
        return str(value)
    raise TypeError(f"a value of type {type(value).__name__}")
