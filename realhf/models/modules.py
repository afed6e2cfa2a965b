"""Modules of users: construction and parameter tables. torch is imported on use."""

import json
import zlib
from functools import lru_cache
from importlib import import_module
from typing import Any

from realhf.errors import described
from realhf.models.model_config import ModuleConfig
from realhf.models.param_spec import InFile, ModelSpec, ParamSpec


def module_of(config: ModuleConfig, *, seed: int = 0, dtype: str = "float32", device: Any = "cpu") -> Any:
    """Build the module, with the weights that its own initialisation draws from `seed`.

    Raises ValueError if that fails, or if it is no module.
    """
    torch = import_module("torch")
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed + zlib.crc32(f"{config.name}{config.arguments}{config.draw}".encode()))
        try:
            module = config.module(**json.loads(config.arguments))
        except Exception as error:
            what = f"{config.name} cannot be made with {config.arguments}"
            raise ValueError(f"{what}: {described(error)}") from error
    if not isinstance(module, torch.nn.Module):
        raise ValueError(f"{config.name} returned {type(module).__name__}: it must return a torch.nn.Module")
    return module.to(getattr(torch, dtype))


def named_tensors(module: Any) -> list[tuple[list[str], Any]]:
    """Return the floating-point tensors of the state dict, each with all of its names."""
    tensors: dict[int, tuple[list[str], Any]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if tensor.is_floating_point():
            names, _ = tensors.setdefault(id(tensor), ([], tensor))
            names.append(name)
    return list(tensors.values())


def module_spec(config: ModuleConfig) -> ModelSpec:
    """Return the parameter table: parameters and floating-point buffers, in the order of the state dict.

    A single number has the shape (1,). Buffers, and parameters that need no gradient, are not trained.
    """
    return _spec(config, config.module)


@lru_cache(maxsize=64)
def _spec(config: ModuleConfig, _: Any) -> ModelSpec:
    parameter = import_module("torch").nn.Parameter
    params = [
        ParamSpec(
            names[0], tuple(tensor.shape) or (1,), 0, short_name=names[0], in_file=InFile(names[0]),
            trainable=isinstance(tensor, parameter) and tensor.requires_grad)
        for names, tensor in named_tensors(module_of(config))]
    if not params:
        raise ValueError(f"{config.name} has no parameters")
    return ModelSpec(config, tuple(params))
