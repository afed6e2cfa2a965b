"""The tensors of a Hugging Face model directory, checked against the parameter table. Free of torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from realhf.checkpoint.tensor_files import STORED_DTYPES, StoredTensor, find_tensors
from realhf.models.param_spec import ModelSpec, ParamSpec
from realhf.models.region import Region

LM_HEAD = "lm_head.weight"
SCORE = "score.weight"
_BUFFERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Endings of the names of tensors in older checkpoints that are not weights."""


@dataclass(frozen=True)
class ModelFiles:
    """The tensors of a model directory, whose names, shapes and dtypes have been checked."""

    tensors: Mapping[str, StoredTensor]
    """Name in the parameter table (`InFile.name`), whatever prefix the file uses -> tensor."""
    missing: tuple[str, ...]
    """Parameters that the files lack: at most score.weight, when a critic starts from a language model."""
    head_copy: StoredTensor | None = None
    """The lm_head.weight that a tied model's files may have beside the embedding; both must be equal."""
    further_layers: tuple[int, ...] = ()
    """Layers beyond the config's, for multi-token prediction, which are not read."""


def params_by_tensor(params: Iterable[ParamSpec]) -> dict[str, list[ParamSpec]]:
    """Return name of a tensor in a checkpoint -> the parameters in it."""
    by_tensor: dict[str, list[ParamSpec]] = {}
    for param in params:
        by_tensor.setdefault(param.in_file.name, []).append(param)
    return by_tensor


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return name of a tensor in a checkpoint -> its shape."""
    return {name: tensor_shape(params) for name, params in params_by_tensor(spec.params).items()}


def tensor_shape(params: list[ParamSpec]) -> tuple[int, ...]:
    """Return the shape of the tensor that holds these parameters in a checkpoint."""
    if params[0].num_terms > 1:
        return params[0].shape[1:]
    rows, *other_dims = params[0].shape
    shape = (sum(param.shape[0] for param in params), *other_dims)
    return shape[::-1] if params[0].in_file.transposed else shape


def box_in_tensor(param: ParamSpec, region: Region) -> Region:
    """Return the box of a parameter's region in its tensor of a checkpoint."""
    if param.num_terms > 1:
        return region[1:]
    (low, high), *other_dims = region
    box = ((low + param.in_file.start, high + param.in_file.start), *other_dims)
    return box[::-1] if param.in_file.transposed else box


def box_start(tensor: StoredTensor, box: Region) -> tuple[int, bool]:
    """Return the byte of the file at which a box of a tensor begins, and whether the box has whole rows."""
    start = tensor.start + box[0][0] * tensor.row_bytes
    if box[1:] == tuple((0, size) for size in tensor.shape[1:]):
        return start, True
    return start + box[1][0] * (tensor.row_bytes // tensor.shape[1]), False


def open_checkpoint(directory: Path, spec: ModelSpec) -> ModelFiles:
    """Read the headers; raise ValueError that names file and tensor if they are not those of this model."""
    config = spec.config
    shapes = tensor_shapes(spec)
    if "quantization_config" in config.hf:
        raise ValueError(
            f"{directory}/config.json says that the checkpoint is quantised: dequantise it, "
            "and take quantization_config out")
    tensors: dict[str, StoredTensor] = {}
    head_copy = None
    further = set[int]()
    prefix = config.describes.names["embedding"].partition(".")[0] + "."
    for stored_name, tensor in find_tensors(directory).items():
        # A model without a head saves its weights without the prefix that a model with a head adds.
        name = stored_name if stored_name in shapes else prefix + stored_name
        if name in tensors:
            raise ValueError(f"{directory} has {name} twice, with and without the prefix {prefix!r}")
        if name in shapes:
            check_tensor(tensor, stored_name, shapes[name])
            tensors[name] = tensor
        elif stored_name == LM_HEAD and config.tied:
            head_copy = tensor
        elif (layer := _further_layer(spec, stored_name, prefix)) is not None:
            further.add(layer)
        elif stored_name not in (LM_HEAD, SCORE) and not stored_name.endswith(_BUFFERS):
            raise ValueError(f"{tensor.path}: a {config.family} model has no parameter {stored_name}")
    embedding = f"{config.describes.names['embedding']}.weight"
    if head_copy is not None:
        check_tensor(head_copy, LM_HEAD, shapes[embedding])
        if embedding not in tensors:
            tensors[embedding] = head_copy
            head_copy = None
    missing = sorted(shapes.keys() - tensors)
    if refused := [name for name in missing if name != SCORE]:
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        raise ValueError(f"{directory}: parameter {refused[0]}{more} is in none of the safetensors files")
    return ModelFiles(tensors, tuple(missing), head_copy, tuple(sorted(further)))


def check_tensors(directory: Path, spec: ModelSpec) -> None:
    """Read the headers; raise ValueError if a file is corrupt, or a parameter has a wrong shape or dtype.

    Parameters that are missing, and tensors of other names, are accepted.
    """
    shapes = tensor_shapes(spec)
    for name, tensor in find_tensors(directory).items():
        if name in shapes:
            check_tensor(tensor, name, shapes[name])


def check_tensor(tensor: StoredTensor, name: str, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless the tensor has this shape and a supported dtype."""
    where = f"{tensor.path}: tensor {name} has"
    if name == SCORE and tensor.shape[1:] == shape[1:] and tensor.shape != shape:
        raise ValueError(f"{where} {tensor.shape[0]} rows: only reward models of num_labels 1 are supported")
    if tensor.dtype not in STORED_DTYPES:
        raise ValueError(
            f"{where} dtype {tensor.dtype}: supported are {', '.join(STORED_DTYPES)}; "
            "dequantise the checkpoint first")
    if tensor.shape != shape:
        raise ValueError(f"{where} shape {tensor.shape}; the config says {shape}")


def _further_layer(spec: ModelSpec, name: str, prefix: str) -> int | None:
    """Return the layer of a tensor if it comes after the model's last layer, else None."""
    family = spec.config.describes
    layers = family.names["attn_norm"].partition("{layer}")[0] if family.more_layers else ""
    for candidate in (name, prefix + name) if layers else ():
        number = candidate.removeprefix(layers).partition(".")[0]
        if candidate.startswith(layers) and number.isdecimal() and int(number) >= spec.config.num_layers:
            return int(number)
    return None
