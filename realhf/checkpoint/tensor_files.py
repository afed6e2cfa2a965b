"""Safetensors files and their index, and the tensors of a Hugging Face model directory. Free of torch.

Only headers are read here. Everything that they say is checked against the files, and the tensors of a
model against the parameter table.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realhf.errors import cut
from realhf.models.param_spec import ModelSpec, ParamSpec, Region
from realhf.user_input.files import open_regular, parse_json, read_object, refuse_lfs_pointer

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
STORED_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""The supported dtypes: name in a header -> name in torch."""
_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "BF16": 16, "F16": 16,
    "I16": 16, "U16": 16, "I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4}
_MAX_NAME_BYTES = 255
_MAX_INDEX_BYTES = 32_000_000
"""Most bytes of an index. The largest known ones have about 9 MB."""
_MAX_DIMS = 16
_MAX_HEADER_BYTES = 100_000_000  # The limit of the safetensors library.


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, row by row from byte `start` on; `dtype` is its name in headers."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _BITS[self.dtype] // 8

    @property
    def row_bytes(self) -> int:
        return self.num_bytes // self.shape[0]


def find_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a model directory by name.

    Raises ValueError that names the file, and the tensor if the error lies in one.
    """
    if (directory / SINGLE).exists():
        return read_header(directory / SINGLE)
    index = directory / INDEX
    if not index.exists():
        if any(directory.glob("*.bin")):
            raise ValueError(
                f"{directory} has pickled weights (*.bin) only; they are not loaded, as reading them runs "
                "code: open it once with transformers and call "
                "save_pretrained(directory, safe_serialization=True)")
        raise ValueError(f"{directory} has no {SINGLE} and no {INDEX}")
    files: dict[str, StoredTensor] = {}
    promised = _read_index(index)
    for file in dict.fromkeys(promised.values()):
        path = directory / file
        if not path.exists():
            raise ValueError(f"{index} names the file {file}, which is missing")
        for name, tensor in read_header(path).items():
            if name not in promised:
                raise ValueError(f"{index} has no entry for tensor {name}, which {file} holds")
            if name not in files or promised[name] == file:
                files[name] = tensor
    for name, file in promised.items():
        if name not in files or files[name].path != directory / file:
            raise ValueError(f"{index} promises tensor {name} in {file}, where it is not")
    return files


def has_two_sets(directory: Path) -> bool:
    """Return whether a model directory has its weights in one file, which is read, and in parts as well."""
    if not (directory / SINGLE).exists() or not (directory / INDEX).exists():
        return False
    parts = set(_read_index(directory / INDEX).values()) - {SINGLE}
    return any((directory / part).exists() for part in parts)


def _read_index(index: Path) -> dict[str, str]:
    """Return name of a tensor -> name of the file that holds it."""
    files = read_object(index, most=_MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ValueError(
            f"{index} is not an index of safetensors files: it needs an object weight_map: tensor -> file")
    if outside := [file for file in files.values() if Path(file).name != file or not _is_name(file)]:
        raise ValueError(f"{index} names the file {cut(outside[0])}: files must lie beside it")
    return files


def _is_name(file: str) -> bool:
    """Return whether a file can have this name."""
    return "\0" not in file and len(file.encode(errors="surrogatepass")) <= _MAX_NAME_BYTES


def read_header(path: Path, *, follow: bool = True) -> dict[str, StoredTensor]:
    """Return the tensors of a file in their order; raise ValueError unless they fill the file exactly.

    Without `follow`, a symbolic link is refused.
    """
    try:
        with open_regular(path, follow=follow) as file:
            size = os.fstat(file.fileno()).st_size
            beginning = file.read(64)
            refuse_lfs_pointer(beginning, str(path))
            length = int.from_bytes(beginning[:8], "little")
            file.seek(8)
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"{path} is no safetensors file: its header would have {length} bytes")
            if size < 8 + length:
                raise ValueError(
                    f"{path} is truncated: its header ends at byte {8 + length}, the file at {size}")
            text = file.read(length)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    try:
        header = parse_json(text, "the header")
        assert isinstance(header, dict)
    except (ValueError, AssertionError) as error:
        raise ValueError(f"{path} is corrupt: its header is no JSON object") from error
    header.pop("__metadata__", None)
    begin = 8 + length
    stored = {name: _stored_tensor(path, name, fields, begin) for name, fields in header.items()}
    tensors = dict(sorted(stored.items(), key=lambda item: (item[1].start, item[1].num_bytes)))
    stop = begin
    for name, tensor in tensors.items():
        if tensor.start != stop:
            raise ValueError(f"{path} is corrupt: tensor {name} starts at byte {tensor.start}, not at {stop}")
        stop += tensor.num_bytes
    if stop != size:
        kind = "truncated" if stop > size else "corrupt"
        raise ValueError(f"{path} is {kind}: its tensors end at byte {stop}, the file at {size}")
    return tensors


def _stored_tensor(path: Path, name: str, fields: Any, begin: int) -> StoredTensor:
    """Return a tensor, given its fields in the header; `begin` is the first byte after the header."""
    try:
        dtype, shape, (start, stop) = fields["dtype"], fields["shape"], fields["data_offsets"]
        sizes = [*shape, start, stop]
        assert isinstance(dtype, str) and len(shape) <= _MAX_DIMS
        assert all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**63 for n in sizes)
    except (KeyError, TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"{path} is corrupt: its header does not say what tensor {name} is") from error
    if dtype not in _BITS:
        raise ValueError(
            f"{path}: tensor {name} has dtype {dtype!r}: supported are {', '.join(STORED_DTYPES)}")
    if (stop - start) * 8 != math.prod(shape) * _BITS[dtype]:
        raise ValueError(
            f"{path} is corrupt: tensor {name}, {dtype} of shape {tuple(shape)}, has {stop - start} bytes")
    return StoredTensor(path, dtype, tuple(shape), begin + start)


def pack_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    """Return the header of a file that holds these tensors (name, dtype in headers, shape) end to end, and
    the byte of the file at which each tensor begins; under the name "", the size of the file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    stop = 0
    for name, dtype, shape in tensors:
        start, stop = stop, stop + math.prod(shape) * _BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    starts = {name: begin + f["data_offsets"][0] for name, f in header.items() if name != "__metadata__"}
    return len(text).to_bytes(8, "little") + text, starts | {"": begin + stop}


def pack_index(files: Mapping[str, str], total_bytes: int) -> str:
    """Return the text of an index, given tensor -> file."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(files.items()))}
    return json.dumps(index, indent=2) + "\n"


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
    by_tensor: dict[str, list[ParamSpec]] = {}
    for param in params:
        by_tensor.setdefault(param.in_file.name, []).append(param)
    return by_tensor


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
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
