"""Two hosts for tests: network namespaces joined by a wire; where none can be made, tests skip."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from benchmarks.measure.two_hosts import Host, NoNamespacesError, two_hosts


@contextmanager
def two_hosts_or_skip(**wire: Any) -> Iterator[list[Host]]:
    try:
        with two_hosts(**wire) as hosts:
            yield hosts
    except NoNamespacesError as error:
        pytest.skip(str(error))
