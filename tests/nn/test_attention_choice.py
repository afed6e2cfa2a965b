"""A model whose attention no kernel computes is refused when it is built."""

import pytest

from realhf.errors import UserError
from tests.gpu.models import engine_of, write_model
from tests.gpu.pretended import pretended_device
