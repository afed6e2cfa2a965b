"""The transformers engine against transformers itself, and against the native engine."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from realhf.algorithms.sft import CrossEntropy
from realhf.calls import Generate, LogProbs, OptimizerConfig, SamplingConfig, Scores, TrainStep, Values
from realhf.checkpoint.hf import CheckpointWriter
from realhf.checkpoint.tensor_files import check_tensors
from realhf.cli.planning_problem import problem_of
from realhf.cluster import Cluster
from realhf.data.batch import Batch, Packed
from realhf.distributed.world import World
from realhf.engine.base import DTYPES
from realhf.engine.hf_factory import class_spec, file_spec
from realhf.engine.native import NativeEngine
from realhf.engine.transformers import TransformersEngine
from realhf.errors import UserError
from realhf.execution_plan import ExecutionPlan
from realhf.experiment import Role
from realhf.graph import FunctionCall
from realhf.layout import Layout
from realhf.models.lora import LoraConfig
from realhf.models.model_config import ModelConfig, TransformersConfig
from realhf.models.param_spec import model_spec
from realhf.planner.candidates import find_strategies
from realhf.runtime.compile.program import compile_program
from realhf.runtime.trainer import Trainer
from tests.cli_tools import TIMED, ForkedCommand, read_jsonl, write_experiment, write_plan
from tests.engine.reference import ragged_rows
from tests.nn.tiny import hf_config
from tests.reallocators import make_reallocator
from tests.runtime.tiny import HF_CONFIG, make_experiment, write_task
from tests.samples import marked

SIZES = {
    "vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "initializer_range": 0.3, "eos_token_id": [3, 20, 40], "pad_token_id": 0,
}
_OF_GPT = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
TABLES = {
    "gpt_neo": {
        "attention_types": [[["global"], 2]], "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64},
    "gptj": {**_OF_GPT, "rotary_dim": 4},
    "codegen": {**_OF_GPT, "rotary_dim": 4},
    "ctrl": {**_OF_GPT, "dff": 48},
    "mpt": {"max_seq_len": 64, "d_model": 32, "n_layers": 2, "n_heads": 4},
}
"""Families with a limit on positions, as opt has."""
FAMILIES = {
    "phi": {"partial_rotary_factor": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5},
    "gpt_neox": {"attention_dropout": 0.5, "hidden_dropout": 0.5},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    "mamba": {"state_size": 4},
    "mixtral": {"num_local_experts": 4, "num_key_value_heads": 2},
}
"""Families without a native table: tied and untied, with learned positions, recurrent; and one whose files
hold other tensors."""
OPTIMIZER = OptimizerConfig(lr=3e-3, eps=1e-3, weight_decay=0.1, max_grad_norm=2.0)
"""`eps` is below the gradients that count (0.01), but far above rounding noise, which is all that k_proj.bias
has and which AdamW would divide by its own size."""
TRAIN = FunctionCall(
    "actor_train", "train_step", ("sequence_ids", "response_mask"), role="actor",
    work=TrainStep(CrossEntropy()))
ROWS = ragged_rows(7, seed=0)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Family and head -> a directory, and transformers' model of it."""
    models = {}

    def make(family, head="lm"):
        if (family, head) not in models:
            torch.manual_seed(0)
            fields = SIZES | (FAMILIES | TABLES).get(family, {})
            config = transformers.AutoConfig.for_model(family, **fields)
            config.num_labels = 1
            auto = "AutoModelForCausalLM" if head == "lm" else "AutoModelForSequenceClassification"
            model = getattr(transformers, auto).from_config(config).eval()
            directory = tmp_path_factory.mktemp(f"{family}-{head}")
            model.save_pretrained(directory)
            models[family, head] = directory, model
        return models[family, head]

    return make


def engine_of(directory, world=None, *, head="lm", layout="d1@0", dtype="float32", optimizer=None):
    spec = class_spec(TransformersConfig.load(str(directory), head=head))
    how = {"dtype": dtype, "optimizer": optimizer}
    engine = TransformersEngine(spec, Layout.parse(layout), world or World(), **how)
    engine.load(directory, seed=0)
    return engine


def batch_of(rows, *, part=(0, 1)):
    """Return a batch of this part's rows."""
    ids = range(*part[:1], len(rows), part[1])
    sequences = [torch.tensor(rows[i][0] + rows[i][1], dtype=torch.long) for i in ids]
    masks = [torch.tensor([0.0] * len(rows[i][0]) + [1.0] * len(rows[i][1])) for i in ids]
    fields = {"prompt_ids": Packed.of([torch.tensor(rows[i][0], dtype=torch.long) for i in ids])}
    fields |= {"sequence_ids": Packed.of(sequences), "response_mask": Packed.of(masks)}
    return Batch(list(ids), fields)


def forward(engine, work, rows=ROWS):
    call = FunctionCall("forward", "forward", ("sequence_ids",), ("out",), role="actor", work=work)
    return engine.forward(call, batch_of(rows).pick(["sequence_ids"]), micro_batch_tokens=24)["out"]


def generated(engine, *, part=(0, 1), max_rows=512, rows=ROWS, **sampling):
    """Sample id -> (sequence, response mask, log-probs, whether it ended)."""
    outputs = ("sequence_ids", "response_mask", "gen_logprobs", "finished")
    work = Generate(SamplingConfig(**({"max_new_tokens": 6} | sampling)), seed=5, max_rows=max_rows)
    call = FunctionCall("actor_generate", "generate", ("prompt_ids",), outputs, role="actor", work=work)
    batch = engine.generate(call, batch_of(rows, part=part).pick(["prompt_ids"])).batch
    columns = [batch[key].split() for key in outputs[:3]] + [batch["finished"]]
    return {i: tuple(x.tolist() for x in row) for i, *row in zip(batch.ids, *columns, strict=True)}


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_transformers(made, family):
    directory, model = made(family)
    found = forward(engine_of(directory), LogProbs(temperature=0.7)).split()
    for (prompt, completion), logprobs in zip(ROWS, found, strict=True):
        ids = torch.tensor([prompt + completion])
        with torch.no_grad():
            expected = (model(ids).logits[0, :-1] / 0.7).log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(logprobs[1:], expected, rtol=0, atol=1e-5)


def test_values_and_scores_are_those_of_transformers(made):
    directory, model = made("phi", "score")
    engine = engine_of(directory, head="score")
    values, scores = forward(engine, Values()).split(), forward(engine, Scores())
    for (prompt, completion), value, score in zip(ROWS, values, scores, strict=True):
        ids = torch.tensor([prompt + completion])
        ends = [model(ids[:, :stop]).logits.item() for stop in range(1, ids.shape[1] + 1)]
        assert value.tolist()[1:] == pytest.approx(ends[:-1], abs=1e-5)
        assert score.item() == pytest.approx(ends[-1], abs=1e-5)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_train_step_is_that_of_a_plain_loop(made, recompute):
    directory, _ = made("phi")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)
    rows = [(torch.tensor([p + c]), len(p)) for p, c in ROWS]
    cross_entropy = partial(torch.nn.functional.cross_entropy, reduction="sum")
    losses = [cross_entropy(model(ids).logits[0, start - 1 : -1], ids[0, start:]) for ids, start in rows]
    loss = sum(losses) / sum(ids.shape[1] - start for ids, start in rows)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_grad_norm)
    adamw.step()
    engine = engine_of(directory, optimizer=OPTIMIZER)
    metrics = engine.train(TRAIN, [batch_of(ROWS)], micro_batch_tokens=24, recompute=recompute)
    assert norm > OPTIMIZER.max_grad_norm  # It is clipped.
    assert (metrics["loss"], metrics["grad_norm"]) == pytest.approx((loss.item(), norm.item()), rel=1e-5)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(engine.model.shards()[name], tensor, rtol=0, atol=2e-6, msg=name)
    for i, row in generated(engine, temperature=0.0).items():
        ids = torch.tensor([ROWS[i][0]])
        assert row[0] == model.generate(ids, do_sample=False, max_new_tokens=6)[0].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_generation_is_that_of_transformers(made, family):
    directory, model = made(family)
    found = generated(engine_of(directory), temperature=0.0, max_rows=3)
    for i, (prompt, _) in enumerate(ROWS):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6)[0].tolist()
        sequence, mask, logprobs, finished = found[i]
        assert sequence == expected
        assert mask == [0.0] * len(prompt) + [1.0] * (len(expected) - len(prompt))
        assert finished == float(expected[-1] in SIZES["eos_token_id"])
        with torch.no_grad():
            every = model(torch.tensor([expected])).logits[0].log_softmax(-1)
        of_tokens = every[:-1].gather(1, torch.tensor(expected)[1:, None])[:, 0].tolist()
        assert logprobs[len(prompt) :] == pytest.approx(of_tokens[len(prompt) - 1 :], abs=1e-5)


@pytest.mark.parametrize("top_k", [SIZES["vocab_size"], SIZES["vocab_size"] + 1, 10**12])
def test_a_top_k_of_the_whole_vocabulary_filters_nothing(made, top_k):
    engine = engine_of(made("phi")[0])
    assert generated(engine, top_k=top_k) == generated(engine)


@pytest.mark.parametrize("family", ["opt", "gpt_neo", "gptj", "codegen", "ctrl", "mpt"])
def test_generation_beyond_the_last_position_is_refused(made, family):
    """Positions may be learned or come from a computed table; the class itself refuses longer sequences."""
    directory, model = made(family)
    limit = class_spec(TransformersConfig.load(str(directory))).config.num_positions
    longest = max(len(prompt) for prompt, _ in ROWS)
    engine = engine_of(directory)
    assert len(generated(engine, max_new_tokens=limit - longest)) == len(ROWS)
    why = f"a prompt has {longest} tokens and sampling.max_new_tokens is {limit - longest + 1}: "
    with pytest.raises(UserError, match=f"{why}the model has {limit} positions"):
        generated(engine, max_new_tokens=limit - longest + 1)
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.ones(1, limit + 1, dtype=torch.long), use_cache=False)


@pytest.mark.parametrize("family", ["phi", "mamba"])
def test_rounds_continue_samples(made, family):
    """With constant weights rounds give the samples of one call, each of which has its own end."""
    directory, _ = made(family)
    engine = engine_of(directory, dtype="float64")
    outputs = ("sequence_ids", "response_mask", "gen_logprobs", "finished", "versions")
    work = Generate(SamplingConfig(max_new_tokens=13), seed=5, max_rows=4)
    call = FunctionCall("actor_generate", "generate", ("prompt_ids",), outputs, role="actor", work=work)
    prompts = batch_of(ROWS).pick(["prompt_ids"])
    whole = engine.generate(call, prompts, version=7).batch
    assert torch.equal(whole["versions"].values, 7 * whole["response_mask"].values.long())
    lengths = [int(mask.sum()) for mask in whole["response_mask"].split()]
    assert 13 in lengths and len(set(lengths)) > 2
    found, unfinished = {}, None
    for number in range(3):  # The last three samples come later.
        part = prompts.select([range(4), range(4, 7), range(0)][number])
        result = engine.generate(call, part, unfinished=unfinished, budget=(5, 5, 9)[number], version=number)
        unfinished = result.unfinished
        columns = [result.batch[key].split() for key in outputs if key != "finished"]
        columns.append(result.batch["finished"])
        found |= {i: row for i, *row in zip(result.batch.ids, *columns, strict=True)}
    assert unfinished.ids == [] and found.keys() == set(range(7))
    for i, (tokens, mask, logprobs, versions, finished) in found.items():
        assert torch.equal(tokens, whole["sequence_ids"].split()[i])
        assert torch.equal(mask, whole["response_mask"].split()[i])
        assert finished == whole["finished"][i]
        torch.testing.assert_close(logprobs, whole["gen_logprobs"].split()[i], rtol=1e-6, atol=1e-6)
        late = [1] * 5 + [2] * 9
        expected = late if i >= 4 else [0] * 5 + late
        assert versions[mask.bool()].tolist() == expected[: lengths[i]]


def _refused(world, directory, rows, max_new_tokens):
    engine, part = engine_of(directory, world, layout="d2@0-1"), (world.rank, 2)
    with pytest.raises(UserError) as error:
        generated(engine, part=part, rows=rows, max_new_tokens=max_new_tokens)
    return str(error.value)


def test_all_replicas_refuse_what_one_of_them_cannot_generate(pool, made):
    directory, _ = made("opt")
    rows = [([5, 6], []), ([7] * 9, []), ([8], [])]  # The second replica has the long one.
    told = pool.run(_refused, directory, rows, 56, num_ranks=2)
    assert told == [
        "a prompt has 9 tokens and sampling.max_new_tokens is 56: the model has 64 positions"] * 2
    told = pool.run(_refused, directory, [([5], []), ([], []), ([], [])], 4, num_ranks=2)
    assert told == ["the prompt of sample 1 is empty: it must have at least one token"] * 2


def _generated_and_trained(world, directory, layout):
    """Generate and train in an engine whose weights were reallocated from one in d1@0."""
    source, target = Layout.parse("d1@0"), Layout.parse(layout)
    how = {"optimizer": OPTIMIZER, "dtype": "float64"}
    home = engine_of(directory, world, **how) if world.rank in source else None
    engine = home
    if source != target:
        spec = class_spec(TransformersConfig.load(str(directory), head="lm"))
        engine = TransformersEngine(spec, target, world, **how)
        mover = make_reallocator(spec, source, target, world, dtype=torch.float64)
        stats = mover.run(None if home is None else home.shards(), engine.shards())
        assert stats.bytes_sent == (8 * spec.numel if home is not None else 0) and stats.over_bound == 1
        engine.load_adapters(seed=0)  # With the optimizer's copy.
    part = (world.rank, target.dp)
    rows = generated(engine, part=part, temperature=1.3, top_k=40, top_p=0.95)
    metrics = engine.train(TRAIN, [batch_of(ROWS, part=part)], micro_batch_tokens=24)
    return rows, metrics, {name: shard.clone() for name, shard in engine.model.shards().items()}


def test_two_replicas_do_the_same_as_one(pool, made):
    directory, _ = made("phi")
    rows, metrics, weights = _generated_and_trained(World(), directory, "d1@0")
    assert len({tuple(tokens) for tokens, *_ in rows.values()}) == len(ROWS)
    results = pool.run(_generated_and_trained, directory, "d2@0-1", num_ranks=2)
    together = {i: row for part, *_ in results for i, row in part.items()}
    assert {i: row[0] for i, row in together.items()} == {i: row[0] for i, row in rows.items()}
    for _, theirs, shards in results:
        assert theirs == pytest.approx(metrics, rel=1e-5)
        for name, shard in shards.items():
            torch.testing.assert_close(shard, weights[name], rtol=0, atol=1e-6, msg=name)


def test_native_and_transformers_engines_agree(tmp_path):
    config = hf_config(tied=True) | {"eos_token_id": [3, 20, 40]}
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(transformers.AutoConfig.for_model(**config))
    model.save_pretrained(tmp_path)
    theirs = engine_of(tmp_path, optimizer=OPTIMIZER)
    spec = model_spec(ModelConfig.load(str(tmp_path)))
    ours = NativeEngine(spec, Layout.parse("d1@0"), World(), dtype="float32", optimizer=OPTIMIZER)
    ours.load(tmp_path, seed=0)
    assert theirs.model.shards().keys() == ours.model.shards().keys()
    found = [forward(engine, LogProbs()).values for engine in (ours, theirs)]
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)
    for sampling in ({"temperature": 0.0}, {"temperature": 1.2, "top_p": 0.9}):
        rows = [generated(engine, **sampling) for engine in (ours, theirs)]
        for mine, others in zip(*(part.values() for part in rows), strict=True):
            assert (mine[0], mine[1], mine[3]) == (others[0], others[1], others[3])
            assert mine[2] == pytest.approx(others[2], abs=1e-5)
    mine, others = (
        engine.train(TRAIN, [batch_of(ROWS)], micro_batch_tokens=24) for engine in (ours, theirs))
    assert mine == pytest.approx(others, rel=1e-5)
    for name, shard in ours.model.shards().items():
        torch.testing.assert_close(theirs.model.shards()[name], shard, rtol=0, atol=2e-6, msg=name)


@pytest.mark.parametrize(("family", "head"), [("opt", "lm"), ("mixtral", "lm"), ("phi", "score")])
def test_exported_directories_open_in_transformers(made, tmp_path, family, head):
    directory, model = made(family, head)
    engine = engine_of(directory, head=head)
    spec, layout = file_spec(engine.model.spec), Layout.parse("d1@0")
    writer = CheckpointWriter(spec, layout, World(), dtype=DTYPES["float32"], leader=0)
    writer.write(tmp_path, engine.export_shards(), beside={})
    written, theirs = (load_file(path / "model.safetensors") for path in (tmp_path, directory))
    assert written.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in written.items())
    there = transformers.AutoConfig.from_pretrained(tmp_path)
    assert there.architectures == [type(model).__name__]
    again, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_a_critic_starts_from_a_language_model(made, capsys):
    directory, model = made("gpt_neox")
    engines = [engine_of(directory, head="score") for _ in range(2)]
    shards = engines[0].model.shards()
    assert torch.equal(shards["gpt_neox.embed_in.weight"], model.gpt_neox.embed_in.weight)
    assert shards["score.weight"].std() > 0
    assert torch.equal(shards["score.weight"], engines[1].model.shards()["score.weight"])
    assert "is left out" in capsys.readouterr().err


PHI = HF_CONFIG | {"model_type": "phi", "architectures": ["PhiForCausalLM"], "num_hidden_layers": 2}
CALLS = ("actor_generate", "ref_forward", "actor_train")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """The tiny task for a model without a table."""
    directory = write_task(tmp_path_factory.mktemp("task"))
    (directory / "config.json").write_text(json.dumps(PHI))
    return directory


def _grpo(task, layouts=("d1@0",) * 3):
    """GRPO on the task with the transformers engine, and a plan."""
    experiment = make_experiment("grpo", task, steps=2)
    experiment.actor = replace(experiment.actor, engine="transformers")
    calls = {name: {"layout": layout} for name, layout in zip(CALLS, layouts, strict=True)}
    return experiment, ExecutionPlan.from_dict({"calls": calls})


@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts",
    [("d1@0",) * 3, ("d2@0-1", "d1@1", "d1@0")],
    ids="-".join,
)
def test_grpo_from_the_command_line(tmp_path, layouts):
    """With generation on two replicas and the reference beside training, whole replicas move: nothing else
    changes."""
    experiment = write_experiment(tmp_path, model=PHI, steps=2)
    plan = write_plan(tmp_path, dict(zip(CALLS, layouts, strict=True)))
    words = ("--plan", plan, "--actor.engine", "transformers", "--out", tmp_path / "out")
    with ForkedCommand("run", experiment, *words) as command:
        program = compile_program(*_grpo(tmp_path), world_size=1)
        expected = Trainer(program, World(), quiet=True).run()
        code, _, err = command.finish(timeout=240)
    assert code == 0, err
    assert len(expected.metrics) == 2
    _, *metrics = read_jsonl(tmp_path / "out" / "metrics.jsonl")  # The first evaluation comes before.
    for ours, theirs in zip(metrics, expected.metrics, strict=True):
        names = [name for name in theirs if not name.startswith((*TIMED, "realloc"))]
        assert {"reward/mean", "actor/loss", "actor/grad_norm", "response_length/mean"} <= {*names}
        assert [ours[name] for name in names] == pytest.approx([theirs[n] for n in names], rel=1e-4, abs=1e-6)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["eval_last"] == pytest.approx(expected.summary["eval_last"])
    model = transformers.AutoModelForCausalLM.from_pretrained(summary["hf_dir"])
    assert type(model).__name__ == "PhiForCausalLM"
    num_bytes = sum(tensor.numel() for tensor in model.parameters()) * 8
    assert summary["realloc"].get("actor", {}).get("bytes_per_step", 0) == num_bytes * (len({*layouts}) > 1)


@pytest.mark.parametrize("kind", marked(["sft", "ppo"], quick=[1]))
def test_runs_are_those_of_the_native_engine(tmp_path, kind):
    """Both engines run in float32, from the same directories."""
    config = transformers.AutoConfig.for_model(**HF_CONFIG, num_labels=1)
    torch.manual_seed(0)
    write_task(tmp_path)
    transformers.Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    transformers.Qwen2ForSequenceClassification(config).save_pretrained(tmp_path / "score")
    found = []
    for engine in ("native", "transformers"):
        experiment = make_experiment(kind, tmp_path, steps=2)
        for name, role in experiment.roles().items():
            if hasattr(experiment, name) and getattr(experiment, name) is not None:
                model = str(tmp_path / "score" if role.head == "score" else tmp_path)
                changes = {"model": model, "random_init": False, "dtype": "float32", "engine": engine}
                setattr(experiment, name, replace(role, **changes))
        assert {role.engine for role in experiment.roles().values()} == {engine}
        found.append(Trainer(compile_program(experiment, None, world_size=1), World(), quiet=True).run())
    for ours, theirs in zip(*(result.metrics for result in found), strict=True):
        names = [name for name in ours if not name.startswith((*TIMED, "realloc"))]
        assert "actor/grad_norm" in names
        for name in names:
            assert theirs[name] == pytest.approx(ours[name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("layout", ["t2@0-1", "p2@0-1", "c2@0-1", "d2e2@0-1"])
def test_layouts_without_whole_replicas_are_refused(task, layout):
    experiment, plan = _grpo(task, (layout, "d1@0", "d1@0"))
    why = f"calls.actor_generate: layout {layout}: the transformers engine has whole replicas only, as in d2@"
    with pytest.raises(ValueError, match=why):
        compile_program(experiment, plan, world_size=2)


def test_what_needs_the_native_engine_is_refused(task):
    experiment, plan = _grpo(task)
    experiment.router_aux_loss_coef = 0.1
    with pytest.raises(ValueError, match="router losses need engine native; actor.engine is transformers"):
        compile_program(experiment, plan, world_size=1)
    with pytest.raises(ValueError, match="docs/models.md .*--actor.engine transformers"):
        ModelConfig.load(str(task))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model_type": "none-such"}, "model_type is 'none-such', which this version of transformers"),
        ({"model_type": None}, "model_type is missing"),
        ({"model_type": "rwkv"}, "model_type is 'rwkv': its class in transformers mixes up the rows"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"quantization_config": {}}, "quantised"),
        ({"eos_token_id": "a"}, "eos_token_id is \"a\""),
    ],
)
def test_configs_that_no_class_takes(tmp_path, changes, why):
    (tmp_path / "config.json").write_text(json.dumps(PHI | changes))
    with pytest.raises(ValueError, match=why):
        class_spec(TransformersConfig.load(str(tmp_path)))


def test_faulty_directories_are_named(made, tmp_path):
    directory, _ = made("phi")
    config = json.loads((directory / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(directory / "model.safetensors")
    for changes, why in (
        ({"intermediate_size": 40}, "tensor model.layers.0.mlp.fc1.bias has shape"),
        ({"num_hidden_layers": 3}, r"parameter model.layers.2.* is in none of the safetensors files"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(ValueError, match=why):
            engine_of(tmp_path)


def test_tensors_of_other_dtypes_and_shapes_are_named_by_the_check(made, tmp_path):
    directory, _ = made("phi")
    spec = class_spec(TransformersConfig.load(str(directory)))
    check_tensors(directory, spec)
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.0.mlp.fc1.weight"
    for faulty, why in (
        (tensors[name].to(torch.int8), f"tensor {name} has dtype I8: supported are"),
        (tensors[name][:-1].contiguous(), f"tensor {name} has shape"),
    ):
        save_file(tensors | {name: faulty}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=why):
            check_tensors(tmp_path, spec)


def test_the_planner_takes_whole_replicas_of_a_dense_decoder():
    config = TransformersConfig.from_hf(PHI | {"tie_word_embeddings": False}, head="lm")
    strategies = list(find_strategies(config, 4, cluster=Cluster.load("h100-1x8"), max_dp=8))
    assert [str(strategy) for strategy in strategies] == ["d4"]
    exact = class_spec(config).numel
    assert model_spec(config).numel == pytest.approx(exact, rel=0.1)
    exact = class_spec(known := TransformersConfig.from_hf(hf_config() | {"model_type": "qwen2"})).numel
    assert model_spec(known).numel == exact and known.has_table


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_attention_heads": None}, "config.json has no num_attention_heads"),
        ({"num_local_experts": 8}, r"it has experts \(num_local_experts\), and its family no table"),
    ],
)
def test_what_has_no_usual_sizes_cannot_be_planned(task, tmp_path, changes, why):
    (tmp_path / "config.json").write_text(json.dumps(PHI | changes))
    experiment, _ = _grpo(task)
    experiment.actor = replace(experiment.actor, model=str(tmp_path))
    with pytest.raises(ValueError, match=f"actor.model {tmp_path} cannot be planned: {why}; write the plan"):
        problem_of(experiment, Cluster.load("h100-2x8"))


def test_role_refuses_adapters():
    with pytest.raises(ValueError, match="the transformers engine has no adapters"):
        Role("model", engine="transformers", lora=LoraConfig())
