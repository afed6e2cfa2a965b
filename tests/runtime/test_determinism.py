"""The option `deterministic`: two runs under one plan have the same bits, and what breaks that is refused."""

import hashlib
import json
import os

import pytest

from realhf import SamplingConfig
from realhf.algorithms.on_policy import graph_of
from realhf.calls import Generate
from realhf.cli.main import main
from realhf.errors import UserError
from realhf.execution_plan import ExecutionPlan
from realhf.graph import FunctionCall
from realhf.layout import Layout
from realhf.runtime.compile.program import compile_program
from realhf.runtime.execute.determinism import RECORD, record_surroundings
from tests.cli_tools import REALHF, Command, untimed, write_experiment, write_plan
from tests.runtime.tiny import make_experiment, write_task

SETTINGS = {"deterministic": True, "work_stealing": False, "kv_cache_gib": 0.01}
FLOAT32 = """
experiment = replace(experiment, actor=replace(experiment.actor, dtype="float32"),
    sampling=replace(experiment.sampling, max_new_tokens=12))
"""


def _run(experiment, plan, out, **variables):
    with Command(*REALHF, "run", experiment, "--plan", plan, "--out", out, **variables) as command:
        code, _, err = command.finish()
    return code, err


def _weights(out):
    (directory,) = (out / "hf").iterdir()
    return hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_two_runs_agree_bit_for_bit(num_ranks, tmp_path):
    """With few slots and little memory; in float32, in which every order of sums shows."""
    experiment = write_experiment(tmp_path, steps=1, body=FLOAT32, max_rows=4, **SETTINGS)
    calls = ("actor_generate", "ref_forward", "actor_train")
    plan = write_plan(tmp_path, dict.fromkeys(calls, ("d1@0", "d2@0-1")[num_ranks - 1]))
    for name in ("first", "again"):
        code, err = _run(experiment, plan, tmp_path / name)
        assert code == 0, err
    runs = [untimed(tmp_path / name / "metrics.jsonl") for name in ("first", "again")]
    assert runs[0] == runs[1] and len(runs[0]) >= 1
    assert _weights(tmp_path / "first") == _weights(tmp_path / "again")
    record = json.loads((tmp_path / "first" / RECORD).read_text())
    assert record["variables"]["NCCL_ALGO"] == os.environ.get("NCCL_ALGO", "Ring")
    assert record["graph_rows"]["actor_generate"] == [1, 2, 4]


@pytest.mark.parametrize("changes, sentence", [
    ({"work_stealing": True}, "work_stealing is true: it must be false with deterministic"),
    ({"kv_cache_gib": None}, "kv_cache_gib is None: it must be a number of GiB with deterministic"),
])
def test_what_breaks_it_is_refused(tmp_path, capsys, changes, sentence):
    experiment = write_experiment(tmp_path, steps=1, **{**SETTINGS, **changes})
    assert main(["run", str(experiment), "--out", str(tmp_path / "run")]) == 2
    err = capsys.readouterr().err
    assert sentence in err and "Traceback" not in err


def test_calls_of_other_graphs_are_made_deterministic(tmp_path):
    experiment = make_experiment("grpo", write_task(tmp_path), deterministic=True)
    sampling = SamplingConfig(max_new_tokens=3)
    for work, legal in ((Generate(sampling), False),
                        (Generate(sampling, work_stealing=False, kv_cache_gib=1.0), True)):
        outputs = ("sequence_ids", "response_mask", "gen_logprobs", "finished")
        call = FunctionCall("answer", "generate", ("prompt_ids",), outputs, role="actor", work=work)
        graph = graph_of(call)
        if legal:
            assert experiment.seeded(graph)["answer"].work.deterministic
            continue
        with pytest.raises(ValueError, match="work_stealing is true"):
            experiment.seeded(graph)


def test_other_surroundings_are_refused(tmp_path, monkeypatch):
    experiment = make_experiment("grpo", write_task(tmp_path), eval_dataset=None, **SETTINGS)
    plan = ExecutionPlan.single(experiment.graph(), Layout.parse("d1@0"))
    program = compile_program(experiment, plan, world_size=1)
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    record_surroundings(program, tmp_path)
    record_surroundings(program, tmp_path)
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    with pytest.raises(UserError, match="NCCL_ALGO was Ring, and is Tree here: .* set NCCL_ALGO as it was"):
        record_surroundings(program, tmp_path)
