"""`realhf merge`: writes a model from others: merges adapters, averages, changes the dtype. Free of torch."""

import glob
import shutil
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import get_args

from realhf.checkpoint.merge import average, load_model
from realhf.checkpoint.names import find_checkpoints, step_of
from realhf.cli.overrides import refuse_words
from realhf.errors import UserError, naming
from realhf.experiment import Dtype
from realhf.user_input.hub import TERMS_FILES, TOKENIZER_FILES, find_model

HELP = "write a model from others: merge adapters, average models, change the dtype"
EXAMPLES = (
    "realhf merge runs/lora -o model",
    "realhf merge runs/grpo/hf/step_* --ema 0.9 -o model",
    "realhf merge runs/seed0 runs/seed1 --weights 0.5,0.5 --dtype bfloat16 -o model")


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments of `realhf merge`."""
    add = parser.add_argument
    text = "models, adapters, or runs, which stand for their newest export"
    add("models", nargs="+", metavar="MODEL", help=text)
    add("-o", "--output", required=True, metavar="DIR", help="directory of the model to write")
    add("--weights", metavar="W,W,...", help="weight of each model in the mean; default: equal ones")
    text = "average models in the order of training: m = RATE m + (1 - RATE) of the next one"
    add("--ema", type=float, metavar="RATE", help=text)
    add("--dtype", choices=get_args(Dtype), help="dtype of the weights; default: that of the first model")


def main(options: Namespace, words: list[str]) -> int:
    """Write the model and return the exit code."""
    refuse_words(options.parser, words)
    target = Path(options.output)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"--output {target} exists: name a new directory")
    names = [name for pattern in options.models for name in (glob.glob(pattern) or [pattern])]
    sources: list[Path | str] = [_export(name) for name in names]
    if options.ema is not None:  # A shell sorts step_10 before step_9.
        sources.sort(key=lambda path: step_of(Path(path)) or 0)
    weights = _weights(options, len(sources))
    model = average(sources, weights) if len(sources) > 1 else load_model(sources[0])
    if options.dtype is not None:
        import torch

        model = model.to(getattr(torch, options.dtype))
    model.save_pretrained(target)
    first = find_model(str(sources[0]), weights=False)
    for pattern in (*TOKENIZER_FILES, *TERMS_FILES):
        for file in first.glob(pattern):
            (target / file.relative_to(first)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target / file.relative_to(first))
    print(f"realhf: wrote {target}", file=sys.stderr)
    return 0


def _export(name: str) -> Path | str:
    """Return the newest export of a run, and other models as they are."""
    path = Path(name)
    if not (path / "hf").is_dir():
        return path if path.exists() else name
    exports = find_checkpoints(path / "hf")
    if not exports:
        raise UserError(f"{name} is the directory of a run without an exported model (hf/step_N)")
    return exports[max(exports)]


def _weights(options: Namespace, count: int) -> list[float]:
    """Return the weights of the models in their mean, of the sum 1."""
    if options.ema is not None:
        rate = options.ema
        if options.weights is not None or not 0 <= rate < 1:
            raise UserError(f"--ema {rate:g}: it must be from 0 to below 1, and --weights must be left out")
        return [rate ** (count - 1), *((1 - rate) * rate ** (count - 1 - i) for i in range(1, count))]
    if options.weights is None:
        return [1 / count] * count
    with naming(f"--weights {options.weights}"):
        weights = [float(text) for text in options.weights.split(",")]
        if len(weights) != count or not abs(sum(weights)) > 1e-9 or not all(abs(w) < 1e9 for w in weights):
            raise ValueError(f"there must be {count} numbers, one for each model, with a sum other than 0")
    return [weight / sum(weights) for weight in weights]
