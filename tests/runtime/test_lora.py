"""Runs of roles with adapters: results under all plans, reallocations, shared memory and exports."""

import json
import math
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import transformers
from safetensors.torch import load_file

from realhf import LoraConfig
from realhf.checkpoint.hf import load_weights, save_weights
from realhf.cli.overrides import override
from realhf.execution_plan import ExecutionPlan
from realhf.layout import Layout
from realhf.models.param_spec import region_size
from realhf.runtime.compile.actions import parameter_specs
from realhf.runtime.compile.program import compile_program
from realhf.runtime.doubts.models import other_bases
from realhf.runtime.trainer import Trainer
from realhf.runtime.weights.model_store import ModelStore
from tests.cli_tools import TIMED
from tests.nn.tiny import build
from tests.runtime.tiny import HF_CONFIG, Recorder, make_experiment, recording, write_task
from tests.samples import marked

CALLS = ("actor_generate", "ref_forward", "actor_train")
PPO_CALLS = (
    "actor_generate", "reward_forward", "ref_forward", "critic_forward", "actor_train", "critic_train",
)
LORA = LoraConfig(rank=3, alpha=6.0)
PLANS = [
    ("d1@0", "d1@0", "t2@0-1"),
    ("d4@0-3", "t2@2-3", "d2t2@0-3"),
    ("t2p2@0-3", "p2@0-1", "p2d2@0-3"),
    ("t4@0-3", "d2@2-3", "d2p2@0-3"),
    ("d2@0-1", "c2@2-3", "c2t2@0-3"),
]


def _experiment(kind, task, lora=LORA, **changes):
    """Return an experiment with a larger learning rate than without adapters, as B starts from zero."""
    experiment = make_experiment(kind, task, **changes)
    for name in ("actor", "critic") if kind == "ppo" else ("actor",):
        role = getattr(experiment, name)
        optimizer = replace(role.optimizer, lr=2e-2, warmup_steps=0)
        base = {"model": str(task / "base"), "random_init": False}
        setattr(experiment, name, replace(role, lora=lora, optimizer=optimizer, **base))
    return experiment


def _plan(layouts, calls=CALLS):
    pairs = zip(calls, layouts, strict=True)
    return ExecutionPlan.from_dict(
        {"calls": {call: {"layout": layout, "micro_batch_tokens": 40} for call, layout in pairs}})


def _run(world, kind, layouts, task, lora, out=None, changes=()):
    recorder = Recorder()
    experiment = recording(_experiment(kind, task, lora, **dict(changes)), recorder)
    plan = _plan(layouts, CALLS if kind == "grpo" else PPO_CALLS)
    program = compile_program(experiment, plan, world_size=4)
    result = Trainer(program, world, quiet=True, out=out).run()
    return (recorder.steps, result.metrics, result.summary) if world.rank == 0 else None


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    """Return the directory of a task, with a model in its folder `base`."""
    task = write_task(tmp_path_factory.mktemp("task"))
    save_weights(task / "base", build(HF_CONFIG, dtype=torch.float32))
    for file in task.glob("tokenizer*"):
        (task / "base" / file.name).write_bytes(file.read_bytes())
    return task


@pytest.fixture(scope="module")
def reference(pool, task):
    """Return a function that gives the results of one process by kind."""

    @cache
    def run(kind):
        calls = CALLS if kind == "grpo" else PPO_CALLS
        return pool.run(_run, kind, ("d1@0",) * len(calls), task, LORA)[0]

    return run


def _differences(ours, expected):
    """Return what another plan has changed: "tokens", the last score, names of metrics by step."""
    found = ["tokens"] if ours[0] != expected[0] else []
    pairs = {"eval_last": (ours[2]["eval_last"], expected[2]["eval_last"])}
    for step, (metrics, wanted) in enumerate(zip(ours[1], expected[1], strict=True)):
        names = (name for name in wanted if not name.startswith((*TIMED, "realloc")))
        pairs |= {(step, name): (metrics[name], wanted[name]) for name in names}
    close = partial(math.isclose, rel_tol=1e-9, abs_tol=1e-12)
    return found + [name for name, pair in pairs.items() if not close(*pair)]


def _slow(layouts):
    return pytest.param(layouts, marks=pytest.mark.slow)


QUICK = (PLANS[4],)


@pytest.mark.parametrize("layouts", [p if p in QUICK else _slow(p) for p in PLANS], ids="-".join)
@pytest.mark.slow
def test_a_plan_does_not_change_results(pool, task, reference, layouts):
    assert _differences(pool.run(_run, "grpo", layouts, task, LORA)[0], reference("grpo")) == []


@pytest.mark.slow
def test_critics_with_adapters_train_their_head_under_every_plan(pool, task, reference):
    layouts = ("d2@0-1", "d1@2", "d1@3", "t2@2-3", "p2@0-1", "d2t2@0-3")
    assert _differences(pool.run(_run, "ppo", layouts, task, LORA)[0], reference("ppo")) == []


def test_adapters_learn(reference):
    tokens, metrics, _ = reference("grpo")
    assert len({tuple(row) for row in tokens[0]}) > 12
    assert metrics[-1]["actor/ref_kl"] > 1e-6 and all(step["actor/grad_norm"] > 1e-3 for step in metrics)


@pytest.mark.slow
@pytest.mark.parametrize("layouts", [_slow(("d1@0",) * 3), PLANS[1]], ids="-".join)
def test_merged_generation_draws_the_same_tokens(pool, task, reference, layouts):
    tokens, _, summary = pool.run(_run, "grpo", layouts, task, replace(LORA, merge=True))[0]
    assert tokens == reference("grpo")[0]
    assert summary["eval_last"] == pytest.approx(reference("grpo")[2]["eval_last"], rel=1e-9)


@pytest.mark.slow
def test_after_the_first_step_only_adapters_move(pool, task):
    specs = parameter_specs(_experiment("grpo", task).roles())
    adapters, base = (specs[name].numel * 8 for name in ("actor.lora", "actor"))
    for generator, first in (
        ("d1@2", base + adapters),
        ("d1@0", adapters),  # Where the reference has its home the base is already.
    ):
        layouts, changes = (generator, "d1@0", "d1@1"), {"eval_dataset": None}
        *_, metrics, summary = pool.run(_run, "grpo", layouts, task, LORA, None, tuple(changes.items()))[0]
        assert [step["realloc_bytes/actor"] for step in metrics] == [first, adapters, adapters]
        assert summary["realloc"]["actor"]["bytes_per_step"] == adapters < 0.3 * base


def _memory(world, task, layouts):
    """Run GRPO with adapters; return (reference and actor share memory, models loaded, base unchanged)."""
    program = compile_program(_experiment("grpo", task, steps=1), _plan(layouts), world_size=4)
    with patch("realhf.engine.native.load_weights", wraps=load_weights) as loads:
        trainer = Trainer(program, world, quiet=True)
    store = trainer._state.models
    flats = {name: store.engines[name, home].model.flat for name, home in program.homes.items()
             if world.rank in home}
    before = {name: flat.clone() for name, flat in flats.items()}
    trainer.run()
    unchanged = all(torch.equal(flat, before[name]) for name, flat in flats.items())
    shared = len(flats) == 2 and flats["ref"].data_ptr() == flats["actor"].data_ptr()
    return shared, loads.call_count, unchanged


@pytest.mark.parametrize(
    "layouts, shared, loaded",
    marked([
        (("d4@0-3", "d2t2@0-3", "d2t2@0-3"), [True] * 4, [1] * 4),
        (("d4@0-3", "t2@2-3", "d2t2@0-3"), [False, False, True, True], [1] * 4),
        (("d4@0-3", "d2@2-3", "d2t2@0-3"), [False] * 4, [1, 1, 2, 2]),
    ], quick=[1]),
)
@pytest.mark.slow
def test_the_reference_is_the_memory_beneath_the_adapters(pool, task, layouts, shared, loaded):
    results = pool.run(_memory, task, layouts)
    assert [r[0] for r in results] == shared
    assert [r[1] for r in results] == loaded
    assert all(r[2] for r in results)


@pytest.mark.parametrize("layouts", [_slow(PLANS[1]), _slow(PLANS[2])], ids="-".join)
def test_exports_are_peft_directories(pool, task, tmp_path, layouts):
    """Check that PEFT opens them with the merged model's outputs, and that a run continues from them."""
    import peft  # Here, as it takes seconds and workers do without it.

    outs = {}
    for merged in (False, True):
        outs[merged] = tmp_path / f"merged-{merged}"
        outs[merged].mkdir()
        lora = replace(LORA, export_merged=merged)
        summary = pool.run(_export, task, layouts, lora, outs[merged])[0]
        outs[merged] = Path(summary["hf_dir"])
    settings = json.loads((outs[False] / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(task / "base") and settings["r"] == 3
    assert f'base_model: "{task}/base"' in (outs[False] / "README.md").read_text()
    assert transformers.AutoTokenizer.from_pretrained(outs[False]).vocab_size == HF_CONFIG["vocab_size"]
    plain = transformers.AutoModelForCausalLM.from_pretrained(task / "base")
    opened = peft.PeftModel.from_pretrained(plain, outs[False])
    whole = transformers.AutoModelForCausalLM.from_pretrained(outs[True])
    ids = torch.arange(2, 16)[None]
    torch.testing.assert_close(opened(ids).logits, whole(ids).logits, rtol=1e-4, atol=1e-5)
    trained = load_file(outs[False] / "adapter_model.safetensors")
    assert all(weight.any() for name, weight in trained.items() if "lora_B" in name)
    going_on = LoraConfig(adapter=str(outs[False]))
    out = tmp_path / "again"
    out.mkdir()
    experiment = _from(task, going_on, lr=0.0)
    assert experiment.roles()["ref"].lora == going_on, "the actor's initial weights"
    again = pool.run(_export, task, layouts, going_on, out, 0.0)[0]
    kept = load_file(Path(again["hf_dir"]) / "adapter_model.safetensors")
    assert kept.keys() == trained.keys() and all(torch.equal(kept[name], trained[name]) for name in kept)


def _from(task, lora, *, lr):
    experiment = _experiment("grpo", task, lora, steps=2)
    optimizer = replace(experiment.actor.optimizer, lr=lr, weight_decay=0.0)
    experiment.actor = replace(experiment.actor, dtype="float32", optimizer=optimizer)
    return experiment


def _export(world, task, layouts, lora, out, lr=2e-2):
    program = compile_program(_from(task, lora, lr=lr), _plan(layouts), world_size=4)
    return Trainer(program, world, quiet=True, out=out).run().summary


def _sizes(world, task):
    """Of this rank, numbers of gradients: of the base, of adapters, as the table has it, of a copy's; and of
    what its optimizer owns."""
    program = compile_program(_experiment("grpo", task), _plan(PLANS[1]), world_size=4)
    store = ModelStore(world, program)
    engine = store.engines["actor", program.homes["actor"]]
    held = parameter_specs(program.roles)["actor.lora"].held_by(program.homes["actor"], world.rank)
    copy = store.engines["actor", Layout.parse("d4@0-3")]
    buffers = [parameters.grad_buffer for parameters in (engine.model, engine.adapters, copy.adapters)]
    base, adapters, copied = (0 if buffer is None else buffer.numel() for buffer in buffers)
    expected = sum(map(region_size, held.values()))
    owned = sum(part.numel() for pieces in engine.optimizer_shards().values() for _, part in pieces)
    return base, adapters, expected, copied, owned


def test_only_adapters_have_gradients_and_an_optimizer(pool, task):
    experiment = _experiment("grpo", task)
    adapters = parameter_specs(experiment.roles())["actor.lora"]
    whole = sum(map(region_size, adapters.held_by(Layout.parse("t2@0-1"), 0).values()))
    bases, gradients, expected, copies, owned = zip(*pool.run(_sizes, task), strict=True)
    assert not any(bases) and not any(copies) and gradients == expected
    assert owned[0] + owned[2] == whole and abs(owned[0] - owned[2]) < 0.1 * whole


def test_what_is_wrong_with_adapters_is_said_before_the_run(task, tmp_path):
    def fault(**changes):
        experiment = _experiment("grpo", task)
        for name, value in changes.items():
            setattr(experiment, name, value)
        with pytest.raises(ValueError) as error:
            compile_program(experiment, None, world_size=1)
        return str(error.value)

    actor = _experiment("grpo", task).actor
    wrong = replace(actor, lora=LoraConfig(target_modules=("q",)))
    assert fault(actor=wrong).startswith("actor.lora.target_modules has 'q': legal are q_proj, k_proj")
    high = replace(actor, lora=LoraConfig(rank=17))  # (keys: 2 heads of 8)
    assert fault(actor=high) == "actor.lora.rank is 17: it must be at most 16, the smaller dim of k_proj"
    gone = replace(actor, lora=LoraConfig(adapter=str(tmp_path)))
    assert f"actor.lora.adapter: {tmp_path}/adapter_config.json cannot be read" in fault(actor=gone)
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    assert f"actor.lora.adapter: {tmp_path} has no adapter_model.safetensors" in fault(actor=gone)
    frozen = replace(actor, optimizer=None)
    assert fault(ref=frozen) == "ref.lora: adapters of a frozen role do nothing unless lora.adapter is given"
    drawn = replace(actor, model=str(task), random_init=True)
    assert fault(actor=drawn).startswith("actor.lora: adapters of random weights fit no model")
    experiment = _experiment("grpo", task)
    experiment.actor = replace(drawn, lora=replace(LORA, export_merged=True))
    compile_program(experiment, None, world_size=1)
    follower = replace(actor, optimizer=None, lora=None, follows="actor")
    assert "a role that trains adapters has no followers" in fault(ref=follower)
    with pytest.raises(ValueError, match="a role that follows another cannot have adapters"):
        replace(follower, lora=LORA)


@pytest.mark.parametrize(
    "theirs, warns",
    [
        ("/elsewhere/base", False),
        ("/elsewhere/base/", False),
        ("someone/base", False),
        ("/hub/models--someone--base/snapshots/0f1e", False),
        (None, False),
        ("someone/other", True),
        ("/hub/models--someone--other/snapshots/base", True),
    ],
)
def test_adapters_of_another_model_are_warned_of(task, tmp_path, theirs, warns):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": theirs}))
    roles = _experiment("grpo", task, lora=LoraConfig(adapter=str(tmp_path))).roles()
    assert roles["ref"].lora == roles["actor"].lora
    what = f"actor.lora.adapter {tmp_path} was made for {theirs}, but actor.model is {task}/base"
    mend = "give the model of that name, or leave the adapter out"
    assert other_bases(roles) == [f"{what}: {mend}"] * warns
    assert other_bases({"actor": replace(roles["actor"], random_init=True)}) == []


def test_fields_of_adapters_can_be_overridden(task):
    experiment = _experiment("grpo", task)
    words = ["--actor.lora.rank", "8", "--actor.lora.target-modules", "q_proj", "v_proj"]
    lora = override(experiment, words).actor.lora
    assert lora == replace(LORA, rank=8, target_modules=("q_proj", "v_proj"))
    assert override(experiment, ["--actor.lora.target-modules", "all-linear"]).actor.lora.all_linear
    plain = make_experiment("grpo", task)
    assert override(plain, ["--actor.lora.rank", "8"]).actor.lora == LoraConfig(rank=8)
    assert override(plain, ["--steps", "2"]).actor.lora is None
    with pytest.raises(Exception, match="lora.rank is 0: it must be a whole number of at least 1"):
        override(experiment, ["--actor.lora.rank", "0"])
