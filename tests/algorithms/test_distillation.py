"""Distillation: losses and gradients against full logits of transformers' models, and what its graph has."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from realhf import Distillation, PolicyLossConfig, Role, SamplingConfig
from realhf.algorithms.distillation import ReverseKL, TeacherAdvantages, TeacherWeights, reverse_kl
from realhf.algorithms.mismatch import AgeLimit
from realhf.calls import LogProbs, OptimizerConfig, TopLogProbs, TrainStep
from realhf.data.batch import Batch, Packed
from realhf.devices import chunk_sizes
from realhf.distributed.world import World
from realhf.engine.hf_factory import class_spec
from realhf.engine.native import NativeEngine
from realhf.engine.transformers import TransformersEngine
from realhf.graph import FunctionCall
from realhf.layout import Layout
from realhf.models.model_config import ModelConfig, TransformersConfig
from realhf.models.param_spec import model_spec
from realhf.runtime.execute.host_call import HostContext
from tests.engine.reference import plain_model, ragged_rows
from tests.engine.training import minibatch
from tests.runtime.tiny import role, write_task
from tests.samples import marked

VOCABULARY, TEMPERATURE = 67, 0.7
ROWS = ragged_rows(8, seed=4)
GENERATED = -2.0  # The generator's log-prob of every token.
NAMES = ("teacher_1", "teacher_2")
WEIGHTS = [(0.25, 0.75), (1.0, 0.0)]
"""Weights of both teachers on the rows with even and with odd numbers."""
LINEAR = OptimizerConfig(lr=1e6, eps=1e6, weight_decay=0.0, max_grad_norm=1e9)
"""The first step subtracts the gradient, to six digits."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return the student's directory, the student and two teachers."""
    directory = tmp_path_factory.mktemp("student")
    scales = {"student": 0.3, "teacher_1": 0.25, "teacher_2": 0.2}
    made = [plain_model(tmp_path_factory.mktemp(name), tied=True, initializer_range=scale)
            for name, scale in scales.items()]
    return directory, plain_model(directory, tied=True, initializer_range=0.3), made[1:]


def _logp(model, prompt, completion):
    """Return the log-probs of all tokens in the place of each token of the completion."""
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return (logits / TEMPERATURE).log_softmax(-1)


def _teacher_columns(teachers, k):
    """Return ids and log-probs of the teachers' k most probable tokens by row; 0 on prompts."""
    columns = {}
    with torch.no_grad():
        for name, teacher in zip(NAMES, teachers, strict=True):
            tops = [_logp(teacher, *row).topk(k) for row in ROWS]
            padded = [[F.pad(x, (0, 0, len(p), 0)) for x in (top.indices, top.values)]
                      for (p, _), top in zip(ROWS, tops, strict=True)]
            columns[f"{name}_ids"] = [ids for ids, _ in padded]
            columns[f"{name}_logprobs"] = [logprobs for _, logprobs in padded]
    columns["teacher_weights"] = [
        torch.tensor([(0.0, 0.0)] * len(p) + [WEIGHTS[i % 2]] * len(c)).double()
        for i, (p, c) in enumerate(ROWS)
    ]
    return columns


def _expected(student, columns, k):
    """Compute loss and gradients by loops over sequences and tokens, with kl_div over k + 1 outcomes."""
    student.zero_grad()
    loss, count = 0.0, sum(len(completion) for _, completion in ROWS)
    for i, (prompt, completion) in enumerate(ROWS):
        logp = _logp(student, prompt, completion)
        for name, weight in zip(NAMES, WEIGHTS[i % 2], strict=True):
            for t in range(len(completion)):
                ids = columns[f"{name}_ids"][i][len(prompt) + t]
                theirs = columns[f"{name}_logprobs"][i][len(prompt) + t]
                ours = logp[t, ids]
                others = [v for v in range(VOCABULARY) if v not in ids.tolist()]
                if others:
                    ours = torch.cat([ours, logp[t, others].logsumexp(0, keepdim=True)])
                    theirs = torch.cat([theirs, (1 - theirs.exp().sum(0, keepdim=True)).log()])
                loss = loss + weight * F.kl_div(theirs, ours, reduction="sum", log_target=True)
    (loss / count).backward()
    return (loss / count).item(), {name: p.grad for name, p in student.named_parameters()}


def _step(world, text, directory, columns, engine_type=NativeEngine, *, chunk_tokens=1000):
    """Return the metrics of a train step with ReverseKL, and the gradients of this rank's shards."""
    layout = Layout.parse(text)
    if world.rank not in layout:
        return None
    spec = model_spec(ModelConfig.load(str(directory)))
    if engine_type is TransformersEngine:
        spec = class_spec(TransformersConfig.load(str(directory)))
    engine = engine_type(spec, layout, world, dtype="float64", optimizer=LINEAR)
    engine.load(directory, seed=0)
    before = {name: shard.clone() for name, shard in engine.model.shards().items()}
    work = TrainStep(ReverseKL(NAMES, VOCABULARY), temperature=TEMPERATURE)
    call = FunctionCall(
        "actor_train", "train_step", ("sequence_ids", "response_mask", *columns), role="actor", work=work)
    dp = slice(layout.coordinate(world.rank).dp, None, layout.dp)
    batch = minibatch(ROWS[dp])
    batch.fields |= {name: Packed.of(values[dp]) for name, values in columns.items()}
    mask = batch["response_mask"]
    batch.fields["gen_logprobs"] = mask.like(mask.values * GENERATED)
    numel = chunk_sizes.CHUNK_NUMEL
    try:
        chunk_sizes.CHUNK_NUMEL = chunk_tokens * -(-VOCABULARY // layout.tp)
        metrics = engine.train(call, [batch], micro_batch_tokens=40)
    finally:
        chunk_sizes.CHUNK_NUMEL = numel
    return metrics, {name: before[name] - shard for name, shard in engine.model.shards().items()}


@pytest.mark.parametrize(
    ("engine_type", "chunk_tokens"), [(NativeEngine, 1000), (NativeEngine, 5), (TransformersEngine, 1000)])
@pytest.mark.parametrize("k", marked([1, 6, VOCABULARY], quick=[1]))
def test_loss_and_gradients_are_those_of_full_logits(models, engine_type, chunk_tokens, k):
    directory, student, teachers = models
    columns = _teacher_columns(teachers, k)
    loss, expected = _expected(student, columns, k)
    metrics, found = _step(World(), "d1@0", directory, columns, engine_type, chunk_tokens=chunk_tokens)
    # (transformers' own classes, and so that engine, compute angles and norms in float32.)
    rtol = 2e-6 if engine_type is NativeEngine else 1e-3
    assert loss > 0.01 and metrics["loss"] == pytest.approx(loss, rel=rtol)
    logps = [(_logp(student, prompt, completion), completion) for prompt, completion in ROWS]
    apart = torch.cat([x[range(len(ids)), ids] for x, ids in logps]).detach() - GENERATED
    assert metrics["mismatch/max"] == pytest.approx(float(apart.abs().max()), rel=rtol)
    assert metrics["mismatch/kl"] == pytest.approx(float((apart.exp() - 1 - apart).mean()), rel=rtol)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=rtol * largest, msg=name)


def test_with_the_whole_vocabulary_the_loss_is_the_exact_kl(models):
    directory, student, teachers = models
    exact = 0.0
    with torch.no_grad():
        for i, row in enumerate(ROWS):
            for teacher, weight in zip(teachers, WEIGHTS[i % 2], strict=True):
                exact += weight * F.kl_div(
                    _logp(teacher, *row), _logp(student, *row), reduction="sum", log_target=True).item()
    exact /= sum(len(completion) for _, completion in ROWS)
    losses = [_step(World(), "d1@0", directory, _teacher_columns(teachers, k))[0] for k in (2, 8, 40, 67)]
    values = [metrics["loss"] for metrics in losses]
    assert values[-1] == pytest.approx(exact, rel=1e-6)
    assert values == sorted(values) and values[0] < 0.9 * exact  # A bound that rises with k.
    assert [metrics["rest_mass"] for metrics in losses] == pytest.approx(
        sorted((metrics["rest_mass"] for metrics in losses), reverse=True))


@pytest.mark.parametrize("layout", ["d2@0-1", "t2@0-1", "p2@0-1", "c2@0-1", "d2t2@0-3"])
def test_loss_and_metrics_are_the_same_under_every_layout(pool, models, layout):
    columns = _teacher_columns(models[2], 6)
    whole, gradients = _step(World(), "d1@0", models[0], columns)
    results = pool.run(partial(_step, chunk_tokens=5), layout, models[0], columns)
    found = [metrics for metrics, _ in filter(None, results) if "loss" in metrics]
    assert found and set(whole) >= {"reverse_kl", "actor/reverse_kl/teacher_2", "entropy", "rest_mass"}
    for metrics in found:
        assert metrics == pytest.approx(whole, rel=1e-9)
    if layout == "t2@0-1":  # The embedding is split by rows.
        parts = [gradient["model.embed_tokens.weight"] for _, gradient in filter(None, results)]
        torch.testing.assert_close(
            torch.cat(parts), gradients["model.embed_tokens.weight"], rtol=1e-9, atol=1e-12)


# Host functions

CONTEXT = HostContext("", updates={"actor": 5})


def _answers(*, versions=None):
    """Return two answers of 2 and 1 tokens, with log-probs of the student and two teachers."""
    lengths = [3, 3]
    fields = {
        "response_mask": [0.0, 1, 1, 0, 0, 1], "gen_logprobs": [0.0, -1, -2, 0, 0, -3],
        "teacher_1_logprobs": [0.0, -2, -2.5, 0, 0, -1], "teacher_2_logprobs": [0.0, -3, -1, 0, 0, -7],
    }
    if versions is not None:
        fields["versions"] = versions
    columns = {name: Packed(torch.tensor(values), lengths) for name, values in fields.items()}
    return Batch([0, 1], {
        **columns, "finished": torch.tensor([1.0, 0.0]), "domain": ["teacher_2", "teacher_1"]})


def test_advantages_are_differences_of_log_probs():
    columns, metrics = TeacherAdvantages(NAMES, (0.25, 0.75))(_answers(), CONTEXT)
    by_hand = [0.25 * -1 + 0.75 * -2, 0.25 * -0.5 + 0.75 * 1, 0.25 * 2 + 0.75 * -4]
    assert columns["advantages"].values.tolist() == [0, by_hand[0], by_hand[1], 0, 0, by_hand[2]]
    assert metrics["actor/reverse_kl"] == pytest.approx(-sum(by_hand) / 3)
    assert metrics["actor/reverse_kl/teacher_1"] == pytest.approx((1 + 0.5 - 2) / 3)
    assert metrics["response_length/mean"] == 1.5 and metrics["response_length/clip_ratio"] == 0.5


def test_a_column_names_the_teacher_of_each_row():
    function = TeacherAdvantages(NAMES, (0.5, 0.5), "domain")
    columns, metrics = function(_answers(), CONTEXT)
    assert columns["advantages"].values.tolist() == [0, -2, 1, 0, 0, 2]
    assert metrics["actor/reverse_kl/teacher_2"] == 0.5 and metrics["actor/reverse_kl/teacher_1"] == -2
    weights = TeacherWeights(NAMES, (0.5, 0.5), "domain")(_answers(), CONTEXT)[0]["teacher_weights"]
    assert weights.values.tolist() == [[0, 0], [0, 1], [0, 1], [0, 0], [0, 0], [1, 0]]
    assert function.row_fault({"domain": "teacher_1"}) is None
    fault = "domain is 'math': it must be one of teacher_1, teacher_2"
    assert function.row_fault({"domain": "math"}) == fault


def test_tokens_that_are_too_old_are_left_out():
    batch = _answers(versions=[0, 2, 5, 0, 0, 4])
    settings = (NAMES, (0.25, 0.75), None, AgeLimit(1))
    columns, metrics = TeacherAdvantages(*settings)(batch, CONTEXT)
    assert columns["advantages"].values.isnan().tolist() == [False, True, False, False, False, False]
    assert metrics["staleness/max"] == 3
    weights = TeacherWeights(*settings)(batch, CONTEXT)[0]["teacher_weights"].values
    assert weights.sum(1).tolist() == [0, 0, 1, 0, 0, 1]


# The experiment


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("task"))


def _experiment(task, num_teachers=1, **changes):
    teachers = (role(task, trainable=False),) * num_teachers
    sampling = SamplingConfig(temperature=0.8)
    return Distillation(actor=role(task), teachers=teachers, **({"sampling": sampling} | changes))


def test_the_graph_of_sampled_tokens(task):
    graph = _experiment(task).graph()
    assert [call.name for call in graph.order] == [
        "actor_generate", "teacher_forward", "advantages", "actor_train"]
    assert graph["teacher_forward"].work == LogProbs(temperature=0.8)
    assert graph["actor_train"].work.temperature == 0.8
    assert graph.inputs == ("prompt_ids",)


def test_the_graph_of_the_most_probable_tokens(task):
    experiment = _experiment(task, 2, variant="top_k", top_k=4, teacher_column="domain")
    graph = experiment.graph()
    assert list(experiment.roles()) == ["actor", *NAMES]
    assert graph["teacher_2_forward"].work == TopLogProbs(4, 0.8)
    assert set(graph.inputs) == {"prompt_ids", "domain"}
    assert set(graph["actor_train"].inputs) > {"teacher_1_ids", "teacher_2_logprobs", "teacher_weights"}
    given = replace(experiment, teacher_column=None, teacher_weights=(1.0, 3.0)).graph()
    assert given["teacher_weights"].work.function.weights == (0.25, 0.75)


def _score(prompts, completions, completion_ids):
    return [0.0 for _ in completions]


FAULTS = {
    "no teacher": (0, {}, "teachers is empty: give at least one Role"),
    "weights": (2, {"teacher_weights": (1.0,)}, "teacher_weights is (1.0,): it must have 2 numbers"),
    "no weight": (1, {"teacher_weights": (0.0,)}, "it must have 1 numbers, one per teacher, none negative"),
    "two rules": (2, {"teacher_weights": (1.0, 1.0), "teacher_column": "x"}, "a row has weights or one"),
    "variant": (1, {"variant": "full"}, "variant is 'full': it must be 'sampled' or 'top_k'"),
    "k": (1, {"variant": "top_k", "top_k": 0}, "top_k is 0: it must be at least 1"),
    "a reward": (1, {"reward_function": _score}, "reward_function is given, and distillation has no reward"),
    "a reference": (1, {"loss": PolicyLossConfig(kl_coef=0.1)}, "loss.kl_coef is 0.1: it must be 0"),
    "prompts": (1, {"loss": PolicyLossConfig(average="prompt")}, "loss.average is prompt: it must be token"),
    "a policy loss": (
        1, {"variant": "top_k", "loss": PolicyLossConfig(clip_low=0.1, average="token")},
        "loss has settings of the policy loss"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_told_in_a_sentence(task, fault):
    num_teachers, changes, sentence = FAULTS[fault]
    with pytest.raises(ValueError) as error:
        _experiment(task, num_teachers, **changes).graph()
    assert sentence in str(error.value)


def test_teachers_have_the_actors_vocabulary_and_no_optimizer(task, tmp_path):
    other = plain_model(tmp_path)
    with pytest.raises(ValueError, match=f"of {other.config.vocab_size} tokens and actor.model .* of 18:"):
        replace(_experiment(task), teachers=(Role(str(tmp_path)),)).graph()
    with pytest.raises(ValueError, match="teacher has an optimizer"):
        replace(_experiment(task), teachers=(role(task),)).graph()


def test_evaluation_needs_a_function(task):
    experiment = _experiment(task)
    assert experiment.eval_graph() is None
    names = [call.name for call in replace(experiment, eval_function=_score).eval_graph().calls]
    assert names == ["actor_generate", "reward_forward"]


def test_a_teachers_padding_tokens_join_the_others():
    """A teacher whose vocabulary is padded further may rank a token that the student does not have."""
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (torch.randn(2, 12, generator=generator).double().log_softmax(-1)[:, :3] for _ in range(2))
    ours.requires_grad_()
    columns = {
        "teacher_ids": torch.tensor([[4, 10, 2], [1, 2, 9]]), "teacher_logprobs": theirs,
        "teacher_weights": torch.ones(2, 1).double(), "gen_logprobs": torch.zeros(2).double(),
    }
    batch = Batch([0], {name: Packed(column, [2]) for name, column in columns.items()})
    outputs = {"logprobs_at": ours, "entropy": torch.zeros(2).double(), "logprobs": torch.zeros(2).double()}
    loss = ReverseKL(("teacher",), vocab_size=10)
    value, _ = loss(outputs, batch, loss.totals(batch))
    value.backward()
    expected = reverse_kl(ours[:1, [0, 2]], theirs[:1, [0, 2]]) + reverse_kl(ours[1:], theirs[1:])
    assert value.item() == pytest.approx(expected.item() / 2, rel=1e-12)
    assert ours.grad[0, 1] == 0 and ours.grad[0, 0] != 0
