"""`realhf realloc`: explains one reallocation, without weights or GPUs. Free of torch."""

import json
from argparse import ArgumentParser, Namespace

from rich.console import Console

from realhf.cli.overrides import refuse_words
from realhf.cluster import Cluster
from realhf.errors import UserError, naming
from realhf.layout import Layout
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec
from realhf.planner.problem import ITEMSIZE
from realhf.realloc.links import Links
from realhf.realloc.schedule import make_schedule, schedule_document, schedule_table

HELP = "explain one reallocation: what moves, how long it takes, what limits it"
EXAMPLES = ("realhf realloc --model llama-7b --src d2t4@0-7 --dst d8@0-7",)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments of `realhf realloc`."""
    add = parser.add_argument
    add("--model", required=True, help="config.json, model directory, shipped name or hub name")
    add("--src", required=True, metavar="LAYOUT", help="where the parameters are, such as d2t4@0-7")
    add("--dst", required=True, metavar="LAYOUT", help="where they are to go")
    add("--cluster", help="cluster file or shipped name; default: one host with NVLink between all ranks")
    add("--dtype", choices=ITEMSIZE, help="dtype of the parameters; default: the config's, else bfloat16")
    add("--json", action="store_true", help="print one JSON document")
    add("--transfers", action="store_true", help="with --json: every transfer, and who holds what")


def main(options: Namespace, words: list[str]) -> int:
    """Print the explanation and return the exit code."""
    refuse_words(options.parser, words)
    if options.transfers and not options.json:
        raise UserError("--transfers needs --json: the list is for programs")
    with naming("--model"):
        config = ModelConfig.load(options.model)
        dtype = options.dtype or config.hf_dtype or "bfloat16"
        if dtype not in ITEMSIZE:
            raise ValueError(f"{options.model} has dtype {dtype!r}: legal are {', '.join(ITEMSIZE)}")
    with naming("--cluster"):
        cluster = Cluster.load(options.cluster) if options.cluster else None
    source, target = (_layout(options, name, config, cluster) for name in ("src", "dst"))
    schedule = make_schedule(
        model_spec(config).as_in_checkpoints(), source=source, target=target, itemsize=ITEMSIZE[dtype],
        links=Links.of_cluster(cluster) if cluster else None)
    if options.json:
        print(json.dumps(schedule_document(schedule, transfers=options.transfers)))
    else:
        Console().print(schedule_table(schedule, title=f"{options.model} in {dtype}"))
    return 0


def _layout(options: Namespace, name: str, config: ModelConfig, cluster: Cluster | None) -> Layout:
    """Return the layout that an option names. Raises UserError if the model or the cluster forbids it."""
    with naming(f"--{name} {getattr(options, name)}"):
        layout = Layout.parse(getattr(options, name))
        config.check_layout(layout)
        if cluster is not None and max(layout.ranks) >= cluster.num_devices:
            raise ValueError(
                f"rank {max(layout.ranks)} is not in cluster {options.cluster}, "
                f"which has {cluster.num_devices} devices")
    return layout
