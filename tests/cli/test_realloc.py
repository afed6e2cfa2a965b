"""`realhf realloc`, tested through its JSON: its transfers are executed on arrays of element ids."""

import contextlib
import io
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open

from realhf.cli.main import main
from tests.cli_tools import REPO, ForkedCommand
from tests.samples import drawn

CLUSTERS = sorted(path.stem for path in (REPO / "plans/clusters").glob("*.yaml"))
MOE = {
    "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 13, "head_dim": 4, "moe_intermediate_size": 6, "num_experts": 5,
    "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
}
MLA = {
    "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 13, "moe_intermediate_size": 6, "n_routed_experts": 6,
    "n_group": 1, "topk_group": 1, "n_shared_experts": 2, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "q_lora_rank": 7, "kv_lora_rank": 5, "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2, "v_head_dim": 3,
}

# Model, from, to, more words.
MOVES = [
    ("tiny", "p2t2@0-3", "d4@0-3", "--cluster cpu-laptop"),
    ("tiny", "t2@0-1", "d4@0-3", ""),
    ("tiny", "d2t2@2,3,9,8", "p2@4,0", "--cluster h100-2x8 --dtype bfloat16"),
    ("tiny", "d1@5", "d8t2@0-15", "--cluster h100-2x8"),
    ("moe", "p3@0-2", "d4e4@1-4", ""),
    ("moe", "d4t2e2@0-7", "d3e3p2@4-9", "--cluster h100-2x8"),
    ("moe", "d5t2e5@0-9", "d16e4@0-15", "--cluster h100-2x8 --dtype float16"),
    ("mla", "d2p3e2@0-5", "d6e6@0-5", "--dtype float64"),
    ("mla", "d2t4e2@0-7", "d8e2@8-15", "--cluster h100-2x8"),
]

MOVE = "--src t2@0-1 --dst d4@0-3"
# Words after `realhf realloc` -> words of the sentence.
REFUSED = {
    f"--model nowhere {MOVE}": ["--model", "'nowhere'", "llama-7b", "tiny"],
    f"--model README.md {MOVE}": ["--model", "README.md"],
    "--model tiny --src fast --dst d4@0-3": ["--src fast", "not a layout", "d2t4@0-7"],
    "--model tiny --src x2@0-1 --dst d4@0-3": ["--src x2@0-1", "'x'", "d, c, t, e"],
    "--model tiny --src t2@0-1 --dst d4@0-2": ["--dst d4@0-2", "needs 4 ranks", "has 3"],
    "--model tiny --src t3@0-2 --dst d4@0-3": ["--src t3@0-2", "tp=3", "4 attention heads"],
    "--model tiny --src p3@0-2 --dst d4@0-3": ["--src p3@0-2", "pp=3", "2 layers"],
    "--model tiny --src t2@0-1 --dst e4@0-3": ["--dst e4@0-3", "ep=4", "use ep=1"],
    "--model qwen3-30b-a3b --src d256e256@0-255 --dst d4@0-3": ["--src", "ep=256", "128 experts"],
    "--model qwen3-30b-a3b --src d6e4@0-5 --dst d4@0-3": ["--src", "ep=4", "dp=6"],
    "--model tiny --src t2@0-1 --dst d4@6-9 --cluster h100-1x8": ["--dst d4@6-9", "rank 9", "8 devices"],
    f"--model tiny {MOVE} --cluster nowhere": ["--cluster", "'nowhere'", "h100-8x8", "cpu-laptop"],
    f"--model tiny {MOVE} --cluster README.md": ["--cluster", "README.md"],
    f"--model tiny {MOVE} --dtype int8": ["--dtype", "'int8'", "bfloat16", "float32"],
    f"--model tiny {MOVE} --fast": ["--fast", "--src", "--transfers"],
    f"--model tiny {MOVE} --jso": ["--jso", "--json"],
    f"--model tiny {MOVE} --transfers": ["--transfers", "--json"],
    "--model tiny --src t2@0-1": ["--dst"],
    MOVE: ["--model"],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """Return directories of checkpoints written by transformers, which hold config.json and the shapes."""
    tiny = transformers.AutoConfig.for_model(**json.loads((REPO / "models/tiny.json").read_text()))
    made = {
        "tiny": transformers.Qwen2ForCausalLM(tiny),
        "moe": transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**MOE)),
        "mla": transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**MLA)),
    }
    paths = {name: tmp_path_factory.mktemp(name) for name in made}
    for name, model in made.items():
        assert model.dtype == torch.float32
        model.save_pretrained(paths[name])
    return paths


def shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(directory / "model.safetensors", "numpy") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def realloc(*words: Any) -> tuple[int, str, str]:
    """Return exit code, standard output and standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(["realloc", *map(str, words)])
        except SystemExit as error:
            assert isinstance(error.code, int)
            code = error.code
    return code, out.getvalue(), err.getvalue()


def answer(model: Path | str, source: str, target: str, *words: str) -> dict[str, Any]:
    code, out, err = realloc("--model", model, "--src", source, "--dst", target, "--json", *words)
    assert (code, err) == (0, "")
    return json.loads(out)


def at(region: list[list[int]]) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in region)


class Ranks:
    """Return each rank's element ids of every parameter, with -1 for elements that it does not hold."""

    def __init__(self, ids: dict[str, np.ndarray], held: dict[str, dict[str, Any]]) -> None:
        self.ids = ids
        self.arrays = {
            rank: {name: self._filled(name, regions) for name, regions in params.items()}
            for rank, params in held.items()
        }
        every = (name for params in self.arrays.values() for name in params)
        assert set(every) == set(ids), "all parameters are held and no others"
        for name, truth in ids.items():
            there = [params[name] for params in self.arrays.values() if name in params]
            assert (np.max(there, axis=0) == truth).all(), f"some of {name} is held by nobody"

    def _filled(self, name: str, regions: list[Any]) -> np.ndarray:
        array = np.full_like(self.ids[name], -1)
        for region in regions:
            assert all(0 <= a < b <= n for (a, b), n in zip(region, array.shape, strict=True))
            array[at(region)] = self.ids[name][at(region)]
        return array

    def of(self, rank: str, name: str) -> np.ndarray:
        return self.arrays.setdefault(rank, {}).setdefault(name, np.full_like(self.ids[name], -1))


def replay(document: dict[str, Any], ids: dict[str, np.ndarray]) -> tuple[Counter[str], Counter[str]]:
    """Execute all transfers, check each of them, and return the elements that each rank sent and received."""
    before, now = (Ranks(ids, document["held"]["src"]) for _ in range(2))
    wanted, sent, received = Ranks(ids, document["held"]["dst"]), Counter[str](), Counter[str]()
    waves: dict[int, list[dict[str, Any]]] = {}
    for transfer in document["transfers"]:
        waves.setdefault(transfer["round"], []).append(transfer)
    assert min(waves) == 0 and max(waves) + 1 == document["rounds"]
    for number in sorted(waves):
        arriving = []
        for t in waves[number]:
            source, target, index = str(t["src"]), str(t["dst"]), at(t["region"])
            data = now.of(source, t["param"])[index].copy()
            assert source != target and data.size and (data >= 0).all(), "a rank sends what it has not"
            assert (wanted.of(target, t["param"])[index] == data).all(), "a rank gets what it does not want"
            arriving.append((target, t["param"], index, data))
            sent[source] += data.size
        for target, name, index, data in arriving:
            array = now.of(target, name)
            assert (array[index] == -1).all(), "a rank gets what it has"
            array[index] = data
            received[target] += data.size
    needed = Counter[str]()
    for rank in document["held"]["dst"]:
        for name, array in wanted.arrays[rank].items():
            assert (np.where(array >= 0, now.of(rank, name), -1) == array).all(), "something did not come"
            needed[rank] += int(((array >= 0) & (before.of(rank, name) < 0)).sum())
    assert received == needed
    return sent, received


@pytest.mark.parametrize(("model", "source", "target", "words"), drawn(MOVES, 5))
def test_transfers_bring_what_is_missing(models, model, source, target, words):
    sizes = shapes(models[model])
    ids = {name: np.arange(math.prod(shape)).reshape(shape) for name, shape in sizes.items()}
    document = answer(models[model], source, target, "--transfers", *words.split())
    itemsize = {"bfloat16": 2, "float16": 2, "float64": 8}.get(words.rpartition("--dtype ")[2], 4)
    sent, received = replay(document, ids)
    assert document["bytes_total"] == itemsize * sum(array.size for array in ids.values())
    assert document["bytes_needed"] == itemsize * received.total() == itemsize * sent.total() > 0
    for key, elements in (("sent_bytes", sent), ("received_bytes", received)):
        assert document[key] == {rank: itemsize * elements[rank] for rank in document[key]}
        assert document[key].keys() == document["held"]["src"].keys() | document["held"]["dst"].keys()
    assert document["scheduled_seconds"] >= document["port_bound_seconds"] * (1 - 1e-9) > 0
    assert document["ratio"] == pytest.approx(
        document["scheduled_seconds"] / document["port_bound_seconds"], rel=1e-9
    )
    assert document["limit"] and document["peak_staging_bytes"] > 0
    assert document["schedule_seconds"] > 0


def test_nothing_moves():
    document = answer("tiny", "d2t2@0-3", "d2t2@0-3", "--transfers")
    assert document["transfers"] == [] and document["rounds"] == document["bytes_needed"] == 0
    assert document["ratio"] == 1 and document["scheduled_seconds"] == document["port_bound_seconds"] == 0
    assert document["held"]["src"] == document["held"]["dst"]


def test_without_transfers():
    document, more = (answer("tiny", "t2@0-1", "d4@0-3", *words) for words in ([], ["--transfers"]))
    assert more.keys() - document.keys() == {"transfers", "held"}
    same = document.keys() - {"schedule_seconds"}
    assert {key: more[key] for key in same} == {key: document[key] for key in same}


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_shipped_clusters(cluster):
    document = answer("tiny", "t2@0-1", "d2@2-3", "--cluster", cluster)
    assert document["bytes_needed"] == 2 * document["bytes_total"]
    assert 1 <= document["ratio"] < 3


def test_for_people():
    words = ("--model", "llama-7b", "--src", "d2t4@0-7", "--dst", "d16@0-15", "--cluster", "h100-2x8")
    with ForkedCommand("realloc", *words) as command:
        code, out, err = command.finish()
    assert (code, err) == (0, "")
    limit = answer("llama-7b", "d2t4@0-7", "d16@0-15", "--cluster", "h100-2x8")["limit"]
    assert limit in " ".join(out.split())
    for part in ("llama-7b in float16, 13.5 GB", "d2t4@0-7 -> d16@0-15", "x the bound", "sends", "receives"):
        assert part in " ".join(out.split())


@pytest.mark.parametrize("words", REFUSED)
def test_wrong_input_is_refused_in_one_sentence(words):
    code, out, err = realloc(*words.split())
    assert (code, out) == (2, ""), err
    assert err.startswith("realhf: ") and err.endswith("\n") and err.count("\n") == 1, err
    for part in REFUSED[words]:
        assert part in err
