"""Tests of tiny tensors."""

from tests.threads import one_thread

__all__ = ["one_thread"]
