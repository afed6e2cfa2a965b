"""Losses and advantages that are one function of a user: values by hand, what they read, what is refused."""

import math
from dataclasses import replace

import pytest
import torch

from realhf import (
    CISPO,
    DPO,
    GRPO,
    GSPO,
    KTO,
    PPO,
    SFT,
    DPOLoss,
    PairwiseRewardModel,
    PolicyLossConfig,
    RewardModel,
)
from realhf.algorithms.advantages import AdvantageInputs, SampleAdvantages
from realhf.algorithms.kl import RewardKL
from realhf.algorithms.policy_loss import PolicyLoss
from realhf.algorithms.preferences import BradleyTerry, KTOLoss
from realhf.algorithms.sft import CrossEntropy
from realhf.calls import Loss, TrainStep, is_own
from realhf.engine.own_loss import OwnLoss
from realhf.errors import UserError
from tests.algorithms.test_against_trl import _pairs
from tests.algorithms.test_policy_against_trl import _batch, _ours
from tests.runtime.tiny import role, some_reward, write_task


def clipped(logprobs, gen_logprobs, advantages):
    """PPO's clipped surrogate as a user would write it."""
    ratio = (logprobs - gen_logprobs).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


@pytest.mark.parametrize("average", ["sequence", "token", "constant"])
def test_a_function_of_tokens_is_averaged_as_shipped_losses_are(average):
    length = 11 if average == "constant" else None
    settings = {"average": average, "constant_length": length, "kl_coef": 0.1}
    batch = _batch(1)
    left_out = batch["advantages"].values.clone()
    left_out[: batch["response_mask"].lengths[0]] = math.nan  # The reward of the first sample has failed.
    batch = replace(batch, fields=batch.fields | {"advantages": batch["response_mask"].like(left_out)})
    value, grad, metrics = _ours(batch, PolicyLossConfig(function=clipped, **settings))
    expected, expected_grad, expected_metrics = _ours(batch, PolicyLossConfig(**settings))
    assert value == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(grad, expected_grad)
    assert metrics.keys() == expected_metrics.keys() - {"clip_fraction"}


def test_columns_of_samples_are_repeated_for_their_tokens():
    batch = _batch()
    weights = [float(i) for i in range(len(batch))]
    batch = replace(batch, fields=batch.fields | {"weight": weights})

    def weighted(logprobs, weight):
        return -weight * logprobs

    value, grad, _ = _ours(batch, PolicyLossConfig(function=weighted, average="token"))
    mask = batch["response_mask"]
    pairs = zip(weights, batch["logprobs"].split(), mask.split(), strict=True)
    expected = -sum(w * float((x * m).sum()) for w, x, m in pairs) / float(mask.values.sum())
    assert value == pytest.approx(expected, rel=1e-12)
    assert len(grad) == len(mask.values)


def test_functions_of_pairs_and_samples():
    batch = _pairs(6)
    shipped = DPOLoss(beta=0.3)
    logprobs = {"logprobs": batch["logprobs"].values}

    def dpo(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps):
        margin = (chosen_logps - ref_chosen_logps) - (rejected_logps - ref_rejected_logps)
        return torch.nn.functional.softplus(-0.3 * margin)

    def per_token(chosen_logps, rejected_logps, chosen_lengths, rejected_lengths):
        margin = chosen_logps / chosen_lengths - rejected_logps / rejected_lengths
        return torch.nn.functional.softplus(1.0 - 2.0 * margin)

    def bradley_terry(chosen_scores, rejected_scores, margin):
        return torch.nn.functional.softplus(rejected_scores - chosen_scores + margin)

    cases = [
        (DPOLoss(function=dpo), shipped, logprobs),
        (DPOLoss(function=per_token), DPOLoss("simpo", beta=2.0, gamma=1.0), logprobs),
        (BradleyTerry(function=bradley_terry), BradleyTerry("margin"), {"scores": batch["scores"]})]
    for ours, theirs, outputs in cases:
        assert ours(outputs, batch, ours.totals(batch))[0].item() == pytest.approx(
            theirs(outputs, batch, theirs.totals(batch))[0].item(), rel=1e-9)
    assert DPOLoss(function=dpo).needs_ref and not DPOLoss(function=per_token).needs_ref
    labels = [i % 2 == 0 for i in range(len(batch))]
    marked = replace(batch, fields=batch.fields | {"label": labels, "kl": batch["scores"] * 0})

    def kto(logps, ref_logps, label, kl):
        return torch.sigmoid((1 - 2 * label) * 0.1 * (logps - ref_logps - kl))

    own = KTOLoss(function=kto)(logprobs, marked, KTOLoss().totals(marked))[0]
    assert own.item() == pytest.approx(KTOLoss()(logprobs, marked, KTOLoss().totals(marked))[0].item())
    sft = CrossEntropy(lambda logprobs: -logprobs)
    assert sft(logprobs, batch, sft.totals(batch))[0].item() == pytest.approx(
        CrossEntropy()(logprobs, batch, sft.totals(batch))[0].item())


class Whole(Loss):
    """A loss with totals of its own."""

    output = "logprobs"
    columns = ("level",)

    def totals(self, batch):
        return {"tokens": float(batch["response_mask"].values.sum())}

    def __call__(self, outputs, batch, totals):
        return -(outputs["logprobs"] * batch["response_mask"].values).sum() / totals["tokens"], {}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("task"))


def _policies(task):
    settings = {"actor": role(task), "reward_function": some_reward, "group_size": 4}
    yield from (kind(**settings, loss=clipped) for kind in (GRPO, CISPO, GSPO))
    yield PPO(**settings, critic=role(task, head="score"), loss=clipped)


def test_every_algorithm_takes_a_function(task):
    for experiment in _policies(task):
        (loss,) = (work.loss for work in experiment.graph().works(TrainStep, role="actor"))
        assert isinstance(loss, PolicyLoss) and loss.function is clipped and is_own(loss)
        assert loss.config.average == type(experiment)().loss.average
    actor = role(task)
    for experiment in (
        SFT(actor=actor, loss=lambda logprobs, level: -level * logprobs),
        RewardModel(reward=role(task, head="score"), loss=lambda scores, level: scores * level),
        PairwiseRewardModel(reward=role(task, head="score"), loss=lambda chosen_scores, level: level),
        DPO(actor=actor, loss=lambda chosen_logps, level: -chosen_logps * level),
        KTO(actor=actor, loss=lambda logps, level: -logps * level),
        GRPO(actor=actor, reward_function=some_reward, loss=lambda logprobs, level: -level * logprobs),
        GRPO(actor=actor, reward_function=some_reward, loss=Whole()),
        DPO(actor=actor, loss=Whole()),
    ):
        graph = experiment.graph()
        assert "level" in graph.inputs and all(is_own(work.loss) for work in graph.works(TrainStep))
        assert experiment.loss.function is not None


def test_a_function_that_reads_the_reference_gets_one(task):
    settings = {"actor": role(task), "reward_function": some_reward}
    near = GRPO(**settings, loss=lambda logprobs, ref_logprobs: (logprobs - ref_logprobs) ** 2)
    assert "ref" in near.roles() and "ref_forward" in [call.name for call in near.graph().calls]
    before = GRPO(**settings, loss=lambda logprobs, prox_logprobs: (logprobs - prox_logprobs) ** 2)
    assert "actor_forward" in [call.name for call in before.graph().calls]
    assert "ref" not in DPO(actor=role(task), loss=lambda chosen_logps: -chosen_logps).roles()


def test_functions_that_are_refused(task):
    batch = _batch()

    def mean(logprobs, advantages):
        return -(logprobs * advantages).mean()

    with pytest.raises(UserError, match=r"loss mean returned a tensor of shape \(\): it must return a"):
        _ours(batch, PolicyLossConfig(function=mean))
    with pytest.raises(ValueError, match=r"loss <lambda> has the parameter \*args: each must have the name"):
        PolicyLossConfig(function=lambda *args: 0).columns  # noqa: B018
    with pytest.raises(ValueError, match="loss.clip_low is 0.1: it must be 0.2 unless loss.objective is ppo"):
        PolicyLossConfig(function=clipped, clip_low=0.1)
    texts = replace(batch, fields=batch.fields | {"level": ["easy"] * len(batch)})
    with pytest.raises(UserError, match="loss reads the column level with 'easy': it must have numbers"):
        _ours(texts, PolicyLossConfig(function=lambda logprobs, level: logprobs * level))


def test_a_function_that_mixes_its_entries_is_named():
    """A mean over a micro-batch depends on the plan; the trial of the first step compares halves."""
    def shared(logprobs, advantages):
        return -logprobs * advantages / advantages.abs().sum()

    for function, is_named in ((shared, True), (clipped, False)):
        batch = _batch()
        sentences: list[str] = []
        loss = OwnLoss(
            PolicyLoss(PolicyLossConfig(function=function)), key="response_mask", warn=sentences.append)
        outputs = {name: batch[name].values.clone().requires_grad_() for name in ("logprobs", "entropy")}
        loss(outputs, batch, loss.totals(batch))
        assert len(sentences) == is_named
        if is_named:
            assert sentences[0].startswith("shared: the loss of a batch is")
            assert "must depend on its own entries alone (no mean, no sum)" in sentences[0]


# Advantages


def _scored(scores, *, group_size=4, seed=0):
    batch = _batch(seed)
    assert len(batch) == len(scores) and len(scores) % group_size == 0
    fields = batch.fields | {
        "score": torch.tensor(scores).double(),
        "finished": torch.tensor([float(i % 3 > 0) for i in range(len(scores))]).double()}
    return replace(batch, fields=fields)


SCORES = [0.0, 1.0, 1.0, 0.5, 2.0, 2.0, 2.0, 2.0]


def of_samples(batch, columns):
    """Return the advantage of each sample, which all of its tokens have."""
    values = [x[m.bool()] for x, m in zip(columns["advantages"].split(), batch["response_mask"].split(),
                                          strict=True)]
    assert all(torch.equal(x.nan_to_num(), x[:1].nan_to_num().expand(len(x))) for x in values)
    return [x[0].item() for x in values]


def best_of_n(scores, groups):
    """Train on the best samples of each prompt alone."""
    best = scores == scores.amax(1, keepdim=True)
    return torch.ones_like(scores).masked_fill(~best, math.nan)


def test_a_best_of_n_filter():
    batch = _scored(SCORES)
    function = SampleAdvantages(4, function=best_of_n, counts_prompt_tokens=True)
    columns, metrics = function(batch, None)
    found = of_samples(batch, columns)
    assert [math.isnan(x) for x in found] == [True, False, False, True, *[False] * 4]
    assert set(found[4:]) == {1.0}
    lengths = [int(m.sum()) for m in batch["response_mask"].split()]
    assert columns["prompt_tokens"].tolist() == [float(sum(lengths[1:3]))] * 4 + [float(sum(lengths[4:]))] * 4
    assert metrics["reward/mean"] == pytest.approx(sum(SCORES) / 8)
    loss = PolicyLoss(PolicyLossConfig())
    assert loss.totals(replace(batch, fields=batch.fields | columns))["sequences"] == 6


def test_the_hook_keeps_filters_kl_and_shaping():
    seen = {}

    def centred(scores, groups, level):
        seen.update(scores=scores.clone(), groups=groups, level=level)
        return scores - scores.mean(1, keepdim=True)

    batch = _scored([*SCORES[:4], 2.0, math.nan, 2.0, 3.0])
    batch = replace(batch, fields=batch.fields | {"level": ["a"] * 4 + ["b"] * 4})
    shaping = AdvantageInputs(score_shaping=lambda score, lengths, finished: score - 0.01 * lengths)
    kl = RewardKL(kl_coef=0.1)
    own = SampleAdvantages(
        4, "none", "none", inputs=shaping, reward_kl=kl, filters=True, function=centred, columns=("level",))
    shipped = SampleAdvantages(4, normalize="none", inputs=shaping, reward_kl=kl, filters=True)
    ours, our_metrics = own(batch, None)
    theirs, their_metrics = shipped(batch, None)
    torch.testing.assert_close(ours["advantages"].values, theirs["advantages"].values, equal_nan=True)
    assert ours["keep"].tolist() == theirs["keep"].tolist() == [True] * 4 + [False] * 4
    assert our_metrics == their_metrics
    assert seen["level"] == ["a", "b"] and seen["scores"].shape == (2, 4)
    assert torch.equal(seen["groups"].finished, batch["finished"].bool().view(2, 4))
    assert seen["groups"].lengths.flatten().tolist() == batch["response_mask"].response_lengths().tolist()


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
@pytest.mark.parametrize("normalize", ["none", "group", "batch"])
def test_a_shaping_may_leave_samples_out(baseline, normalize):
    """What is left out counts in no mean and no deviation: the rest is as if it were not there."""
    def long_ones(score, lengths, finished):
        return score.masked_fill(finished == 0, math.nan)

    batch = _scored([0.0, 1.0, 3.0, 0.5, 2.0, 2.0, 2.0, 7.0])  # 0, 3 and 6 have not finished.
    function = SampleAdvantages(
        4, baseline, normalize, inputs=AdvantageInputs(score_shaping=long_ones), eps=1e-9)
    columns, metrics = function(batch, None)
    found = of_samples(batch, columns)
    groups = [[1.0, 3.0], [2.0, 2.0, 7.0]]
    expected = []
    for group in groups:
        mean = sum(group) / len(group)
        deviation = (sum((x - mean) ** 2 for x in group) / len(group)) ** 0.5
        scale = len(group) / (len(group) - 1) if baseline == "leave_one_out" else 1.0
        expected += [scale * (x - mean) / (deviation if normalize == "group" else 1.0) for x in group]
    if normalize == "batch":
        deviation = (sum(x**2 for x in expected) / len(expected)) ** 0.5
        expected = [x / deviation for x in expected]
    assert [i for i, x in enumerate(found) if math.isnan(x)] == [0, 3, 6]
    assert [x for x in found if not math.isnan(x)] == pytest.approx(expected, rel=1e-6)
    assert metrics["reward/left_out"] == pytest.approx(3 / 8)


def test_a_failed_reward_still_leaves_out_its_group():
    batch = _scored([0.0, math.nan, 3.0, 0.5, 2.0, 2.0, 2.0, 7.0])
    found = of_samples(batch, SampleAdvantages(4)(batch, None)[0])
    assert [math.isnan(x) for x in found] == [True] * 4 + [False] * 4


def test_advantages_that_train_nothing_are_warned_of(capsys):
    SampleAdvantages(4, function=lambda scores, groups: scores * math.nan)(_scored(SCORES), None)
    assert "returned NaN for all samples of a step: they train nothing" in capsys.readouterr().err


def test_hooks_that_are_refused(task):
    settings = {"actor": role(task), "reward_function": some_reward}
    with pytest.raises(ValueError, match="advantages is .*: it must be a function f.scores, groups."):
        GRPO(**settings, advantages=lambda scores: scores).graph()
    batch = _scored(SCORES)
    with pytest.raises(UserError, match=r"returned a tensor of shape \(2,\): it must return a"):
        SampleAdvantages(4, function=lambda scores, groups: scores.mean(1))(batch, None)
    with pytest.raises(UserError, match="returned an object of type tuple: it must return a tensor of shape"):
        SampleAdvantages(4, function=lambda scores, groups: ())(batch, None)
    with pytest.raises(UserError, match="returned infinite numbers: they must be finite, or NaN to leave"):
        SampleAdvantages(4, function=lambda scores, groups: scores / 0)(batch, None)
    experiment = GRPO(**settings, advantages=best_of_n, normalize="batch")
    assert any("normalize is 'batch' and changes nothing, as advantages is given" in doubt
               for doubt in experiment.doubts())
    graph = GRPO(**settings, advantages=lambda scores, groups, level, prompt: scores).graph()
    assert {"level", "column/prompt"} <= set(graph.inputs)
