"""Modules of users: construction and parameter tables. torch is imported on use."""

import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from realhf.errors import described
from realhf.models.model_config import ModuleConfig
from realhf.models.param_spec import InFile, ModelSpec, ParamSpec


def module_of(config: ModuleConfig, *, seed: int = 0, dtype: str = "float32", device: Any = "cpu") -> Any:
    """Build the module, with the weights that its own initialisation draws from `seed`.

    It runs with one thread, as some initialisations (orthogonal ones) round otherwise with several, and plans
    may not change weights. Raises ValueError if it fails, or if it returns no module.
    """
    torch = import_module("torch")
    with torch.random.fork_rng(devices=[]), torch.device(device), _one_thread(torch):
        torch.manual_seed(seed + zlib.crc32(f"{config.name}{config.arguments}{config.draw}".encode()))
        try:
            module = config.module(**json.loads(config.arguments))
        except Exception as error:
            what = f"{config.name} cannot be made with {config.arguments}"
            raise ValueError(f"{what}: {described(error)}") from error
    if not isinstance(module, torch.nn.Module):
        raise ValueError(f"{config.name} returned {type(module).__name__}: it must return a torch.nn.Module")
    return module.to(getattr(torch, dtype))


@contextmanager
def _one_thread(torch: Any) -> Iterator[None]:
    """Let torch compute with one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def named_tensors(module: Any) -> list[tuple[list[str], Any]]:
    """Return the floating-point tensors of the state dict, each with all of its names."""
    tensors: dict[int, tuple[list[str], Any]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not hasattr(tensor, "is_floating_point"):
            raise ValueError(
                f"the state of the module has {name!r}, which is no tensor: keep it out of state_dict()")
        if tensor.is_floating_point():
            names, _ = tensors.setdefault(id(tensor), ([], tensor))
            names.append(name)
    return list(tensors.values())


def complete_state(config: ModuleConfig, path: Path) -> None:
    """Give a file of weights all that `load_state_dict` of the module asks for.

    These are the other names of tensors that have several, the shapes of single numbers, and buffers of
    integers as the module makes them.
    """
    files = import_module("safetensors.torch")
    written = files.load_file(path)
    module = module_of(config)
    names = {name: names[0] for names, _ in named_tensors(module) for name in names}
    state = {}
    for name, tensor in module.state_dict().items():
        if name in names:
            tensor = written[names[name]].view(tensor.shape)
        state[name] = tensor.clone().contiguous()
    path.write_bytes(files.save(state))


def module_spec(config: ModuleConfig) -> ModelSpec:
    """Return the parameter table: parameters and floating-point buffers, in the order of the state dict.

    A single number has the shape (1,). Buffers, and parameters that need no gradient, are not trained.
    """
    return _spec(config, config.module)


@lru_cache(maxsize=64)
def _spec(config: ModuleConfig, _: Any) -> ModelSpec:
    parameter = import_module("torch").nn.Parameter
    tensors = named_tensors(module_of(config))
    for names, tensor in tensors:
        if not tensor.numel():
            raise ValueError(
                f"{config.name} with {config.arguments} has the tensor {names[0]} of shape "
                f"{tuple(tensor.shape)}, without numbers: every parameter and buffer must have some")
    params = [
        ParamSpec(
            names[0], tuple(tensor.shape) or (1,), 0, short_name=names[0], in_file=InFile(names[0]),
            trainable=isinstance(tensor, parameter) and tensor.requires_grad)
        for names, tensor in tensors]
    if not params:
        raise ValueError(f"{config.name} has no parameters")
    return ModelSpec(config, tuple(params))
