"""Memory options of a plan on real processes: they change no result, and weights really leave the device."""

import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from realhf.calls import HostFunction, LogProbs
from realhf.data.loader import Loader
from realhf.distributed.group import Outbox
from realhf.execution_plan import ExecutionPlan
from realhf.experiment import Role
from realhf.graph import FunctionCall
from realhf.layout import Layout
from realhf.runtime.compile.program import compile_program
from realhf.runtime.execute.executor import Executor, PartsProgram, RankState
from realhf.runtime.execute.host_call import HostContext
from realhf.runtime.trainer import Trainer
from realhf.runtime.weights.engine_store import OffloadedWeights
from realhf.runtime.weights.model_store import ModelStore
from tests.cli_tools import TIMED
from tests.runtime.tiny import make_experiment, role, write_task
from tests.samples import marked

SEQUENCE = ("sequence_ids", "response_mask")
GRPO = {"actor_generate": "d2@0-1", "ref_forward": "t2@0-1", "actor_train": "d2@0-1"}
PPO = {**GRPO, "reward_forward": "p2@0-1", "critic_forward": "d2@0-1", "critic_train": "t2@0-1"}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("task"))


def _plan(layouts, **options):
    """Return a plan in which `options` maps calls to the option that they have."""
    entries = {name: {"layout": text} for name, text in layouts.items()}
    for name, option in options.items():
        entries[name][option] = True
    return ExecutionPlan.from_dict({"calls": entries})


def _run(world, kind, task, layouts, options):
    program = compile_program(make_experiment(kind, task), _plan(layouts, **options), world_size=4)
    result = Trainer(program, world, quiet=True).run()
    plain = [{k: v for k, v in step.items() if not k.startswith(TIMED)} for step in result.metrics]
    return plain, result.summary.get("eval_last"), [k for step in result.metrics for k in step]


@pytest.mark.parametrize(
    ("kind", "layouts", "options"),
    marked([
        ("grpo", GRPO, {"ref_forward": "offload", "actor_train": "recompute"}),
        ("ppo", PPO, {"ref_forward": "offload", "reward_forward": "offload", "critic_train": "recompute"}),
    ], quick=[0]),
)
def test_options_change_no_result(pool, task, kind, layouts, options):
    expected, expected_score, _ = pool.run(_run, kind, task, layouts, {})[0]
    metrics, score, names = pool.run(_run, kind, task, layouts, options)[0]
    assert metrics == expected and score == expected_score
    assert ("timing_s/offload/reward" in names) == ("reward_forward" in options)
    assert "timing_s/offload/ref" in names and "timing_s/ref_forward" in names


def _same(batch, context):
    """Assert that both reference calls returned the same log-probs."""
    pairs = zip(batch["ref_logprobs"].split(), batch["again_logprobs"].split(), strict=True)
    return {}, {"difference": max((a - b).abs().max().item() for a, b in pairs)}


def _two_references(task):
    """Return GRPO with a second call of the reference and a comparison of both."""
    experiment = make_experiment("grpo", task, eval_dataset=None)
    again = FunctionCall("ref_again", "forward", SEQUENCE, ("again_logprobs",), role="ref", work=LogProbs())
    inputs = ("ref_logprobs", "again_logprobs")
    graph = experiment.graph().add(again, FunctionCall("same", "host", inputs, work=HostFunction(_same)))
    experiment.graph = lambda: graph
    return experiment


def _device_bytes(store, program):
    layouts = [program.plan[name].layout for name in ("ref_forward", "ref_again")]
    engines = [store.engines.get(("ref", layout)) for layout in layouts]
    return [None if e is None else e.model.flat.untyped_storage().nbytes() for e in engines]


def _steps(world, task, layouts, options, out):
    """Return for each step the reference's bytes on the device after it and its record; also the number of
    forward passes of a block of the actor."""
    program = compile_program(_two_references(task), _plan(layouts, **options), world_size=4)
    store = ModelStore(world, program)
    context, experiment = HostContext(str(task)), program.experiment
    settings = {"keys": program.graph.inputs, "group_size": experiment.group_size, "seed": 0}
    loader = Loader(experiment.dataset, tokenizer=context.tokenizer, **settings)
    outbox = Outbox()
    executor = Executor(
        RankState(world, store, context, outbox=outbox),
        PartsProgram(program.parts, program.plan, loader.batch, experiment.group_size))
    seen, passes = [(_device_bytes(store, program), [], {})], []
    if world.rank in program.homes["actor"]:
        blocks = store.engines["actor", program.homes["actor"]].model.blocks
        extend = blocks[0].extend
        blocks[0].extend = lambda *args, **named: (
            passes.append(torch.is_grad_enabled()) or extend(*args, **named))
    for step in range(2):
        executor.begin_step(is_last=step == 1)
        executor.run("step", range(step * 6, step * 6 + 6))
        record = executor.take_record()
        metrics = {name: value for name, value, _ in record.metrics}
        seen.append((_device_bytes(store, program), record.events, metrics))
    outbox.wait()
    store.export("ref", out)
    seen.append((_device_bytes(store, program), [], {}))
    return seen, sum(passes)


OFFLOAD = {"ref_forward": "offload", "ref_again": "offload"}
REFERENCES = [
    ("t2@0-1", "d2@2-3"),  # on other ranks
    ("t2@0-1", "p2@1-2"),  # on some of them, from one shard to another
    ("d2@0-1", "d4@0-3"),  # the copies of ranks 0 and 1 are one
]


@pytest.mark.parametrize("references", marked([(names,) for names in REFERENCES], quick=[1]))
@pytest.mark.slow
def test_weights_are_on_the_device_during_their_calls_only(pool, task, tmp_path, references):
    layouts = {**GRPO, "ref_forward": references[0], "ref_again": references[1]}
    for rank, (steps, _) in enumerate(pool.run(_steps, task, layouts, OFFLOAD, tmp_path / "rested")):
        runs_on = [rank in Layout.parse(text) for text in references]
        for device_bytes, events, metrics in steps:
            assert device_bytes == [0 if here else None for here in runs_on]
            assert metrics.get("difference", 0.0) <= 1e-12
            loads = [e for e in events if e["kind"] == "offload"]
            assert all(e["name"] == "ref" and e["rank"] == rank for e in loads)
            calls = [e for e in events if e["name"] in OFFLOAD and e["kind"] == "forward"]
            if events:
                assert [e["what"] for e in loads] == ["load", "release"] * sum(runs_on)
                assert len(calls) == sum(runs_on)
            for load, call, release in zip(loads[::2], calls, loads[1::2], strict=True):
                assert load["end"] <= call["start"] <= call["end"] <= release["start"] and load["bytes"] > 0
        transfers = [[e["transfer"] for e in events if e["name"] == "ref" and e["kind"] == "realloc"]
                     for _, events, _ in steps]
        assert not any(transfers[2:]), "a frozen role moves once"
    plain = pool.run(_steps, task, layouts, {}, tmp_path / "plain")
    assert all(bytes_ != 0 for steps, _ in plain for seen, _, _ in steps for bytes_ in seen)
    rested, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("rested", "plain"))
    assert rested.keys() == expected.keys() and any(weight.abs().max() > 0 for weight in expected.values())
    assert all(torch.equal(rested[name], weight) for name, weight in expected.items())


@pytest.mark.slow
def test_the_plan_decides_what_is_recomputed(pool, task, tmp_path):
    layouts = {**GRPO, "ref_forward": "d1@0", "ref_again": "d1@1"}
    plain = pool.run(_steps, task, layouts, {}, tmp_path / "plain")
    again = pool.run(_steps, task, layouts, {"actor_train": "recompute"}, tmp_path / "again")
    assert [passes for _, passes in again] == [2 * passes for _, passes in plain]
    assert plain[0][1] > 0


@pytest.mark.parametrize(
    ("calls", "sentence"),
    [
        (["actor_generate"], "calls.actor_generate.offload: role 'actor' has an optimizer; only frozen"),
        (["same"], "calls.same.offload: a host call has no weights"),
        (["ref_again"], "calls.ref_forward.offload is false: all calls of role 'ref' must have the same"),
        (["ref_forward"], "calls.ref_again.offload is false: all calls of role 'ref' must have the same"),
    ],
)
def test_check_says_what_cannot_be_offloaded(task, calls, sentence):
    plan = _plan({**GRPO, "ref_again": "d2@2-3", "same": "d1@0"}, **dict.fromkeys(calls, "offload"))
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        compile_program(_two_references(task), plan, world_size=4)


def test_a_follower_cannot_be_offloaded(task):
    experiment = _two_references(task)
    roles = experiment.roles()
    roles["ref"] = Role(str(task), dtype="float64", random_init=True, follows="actor")
    experiment.roles = lambda: roles
    with pytest.raises(ValueError, match=r"^calls\.ref_forward\.offload: role 'ref' follows another; only "):
        compile_program(experiment, _plan({**GRPO, "ref_again": "d1@0"}, **OFFLOAD), world_size=4)


def test_an_evaluation_offloads_what_training_does(task):
    """Calls that the plan leaves out get the option of their role's other calls; those in it must agree."""
    experiment = make_experiment("ppo", task)
    assert experiment.reward == role(task, head="score", trainable=False)
    score = replace(experiment.reward_forward(), name="eval_reward")
    calls = [c for c in experiment.eval_graph().calls if c.name != "reward_forward"]
    graph = replace(experiment.eval_graph(), calls=(*calls, score))
    experiment.eval_graph = lambda: graph
    program = compile_program(experiment, _plan(PPO, reward_forward="offload"), world_size=4)
    assert program.offloaded == {"reward"} and program.evaluations[0].plan["eval_reward"].offload
    layouts = {**PPO, "eval_reward": "d1@0"}
    with pytest.raises(ValueError, match=r"^calls\.eval_reward\.offload is false: all calls of role 'rew"):
        compile_program(experiment, _plan(layouts, reward_forward="offload"), world_size=4)
    with pytest.raises(ValueError, match=r"^calls\.eval_reward\.offload is true: all calls of role 'rew"):
        compile_program(experiment, _plan(layouts, eval_reward="offload"), world_size=4)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_views_see_the_weights_again(device):
    flat = torch.arange(12.0, device=device)
    view, weights = flat[4:10].view(2, 3), OffloadedWeights(flat)
    assert flat.untyped_storage().nbytes() == 0 and weights.num_bytes == 48
    for number in range(3):
        weights.load()
        if number == 0:
            view.copy_(torch.ones(2, 3))
        weights.load()  # A second user: the first release takes nothing away.
        assert view.sum().item() == 6
        weights.release(written=number == 0)
        assert view.sum().item() == 6
        weights.release()
        assert flat.untyped_storage().nbytes() == 0
