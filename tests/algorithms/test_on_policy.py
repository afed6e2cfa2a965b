"""The settings that an experiment passes on to its calls, and the calls that its graph has."""

from dataclasses import fields, replace

import pytest

from realhf.algorithms.critic_free import GRPO
from realhf.algorithms.mismatch import AgeLimit
from realhf.algorithms.on_policy import OnPolicy
from realhf.algorithms.policy_loss import PolicyLossConfig
from realhf.algorithms.ppo import PPO
from realhf.algorithms.preferences import RewardModel
from realhf.algorithms.sft import SFT
from realhf.calls import Generate, InsertedPhrase, Interruption, LogProbs, SamplingConfig
from realhf.experiment import Role
from tests.runtime.tiny import CHARACTERS, write_task

CHANGED = {
    "sampling": SamplingConfig(max_new_tokens=7, stop="1="), "seed": 3, "max_rows": 5, "kv_cache_gib": 0.25,
    "prefill_tokens": 9, "work_stealing": False, "cuda_graphs": False, "cache_on_update": "keep",
    "deterministic": True, "generation_weights": "int8",
}


OPTIONS = (
    "max_rows", "kv_cache_gib", "prefill_tokens", "work_stealing", "cuda_graphs", "cache_on_update",
    "deterministic", "generation_weights")


@pytest.mark.parametrize("name", OPTIONS)
def test_a_generation_option_has_the_same_default_in_experiments_and_calls(name):
    assert getattr(OnPolicy, name) == getattr(Generate, name)


def test_every_generation_option_of_an_experiment_reaches_the_call(tmp_path):
    """An interruption is a text there, and becomes ids of the tokenizer, which has a token per character. The
    tokenizer's directory reaches the call if the options have texts."""
    phrase = InsertedPhrase(3, phrase=(2 + CHARACTERS.index("1"), 2 + CHARACTERS.index("=")),
                            end=(2 + CHARACTERS.index("a"),))
    changed = CHANGED | {"interruption": phrase, "tokenizer": str(write_task(tmp_path))}
    others = {"takes_free_memory", "environment"}  # Set by plans; tested with environments.
    assert {field.name for field in fields(Generate)} - others == set(changed)
    text = Interruption(3, phrase="1=", end="a")
    experiment = OnPolicy(**CHANGED, interruption=text, tokenizer=str(tmp_path))
    assert experiment.actor_generate().work == Generate(**changed)
    assert replace(experiment, sampling=SamplingConfig()).actor_generate().work.tokenizer is None


SEQUENCE = ("sequence_ids", "response_mask")
TODAY = {
    "grpo": {
        "actor_generate": (("prompt_ids",), (*SEQUENCE, "gen_logprobs", "finished")),
        "reward_forward": (("prompt", *SEQUENCE), ("score", "completion", "reward_scores")),
        "advantages": (("score", "response_mask", "finished", "reward_scores"), ("advantages",)),
        "actor_train": ((*SEQUENCE, "gen_logprobs", "advantages"), ()),
    },
    "ppo": {
        "actor_generate": (("prompt_ids",), (*SEQUENCE, "gen_logprobs", "finished")),
        "reward_forward": (("prompt", *SEQUENCE), ("score", "completion", "reward_scores")),
        "ref_forward": (SEQUENCE, ("ref_logprobs",)),
        "critic_forward": (SEQUENCE, ("values",)),
        "advantages": (
            ("response_mask", "gen_logprobs", "ref_logprobs", "values", "score", "finished", "reward_scores"),
            ("advantages", "returns"),
        ),
        "actor_train": ((*SEQUENCE, "gen_logprobs", "advantages"), ()),
        "critic_train": ((*SEQUENCE, "values", "returns"), ()),
    },
}
"""Calls, in order, with the keys that they read and write, when no option on other policies is set."""
RECOMPUTED = PolicyLossConfig(proximal="recomputed", importance_cap=2.0)


def _reward(prompts, completions, completion_ids):
    return [0.0] * len(prompts)


def _experiment(kind, **fields):
    made = (GRPO if kind == "grpo" else PPO)(actor=Role("actor"), reward_function=_reward)
    return replace(made, **fields)


def _keys(graph):
    return {call.name: (call.inputs, call.outputs) for call in graph.calls}


@pytest.mark.parametrize("kind", TODAY)
def test_without_options_the_graph_has_no_calls_and_keys_for_them(kind):
    graph = _experiment(kind).graph()
    assert list(_keys(graph).items()) == list(TODAY[kind].items())
    assert graph["advantages"].work.function.inputs.age_limit is None


@pytest.mark.parametrize("kind", TODAY)
def test_recomputed_log_probs_come_from_a_call_before_the_update(kind):
    graph = _experiment(kind, loss=RECOMPUTED, sampling=SamplingConfig(temperature=0.7)).graph()
    call = graph["actor_forward"]
    assert (call.role, call.work) == ("actor", LogProbs(temperature=0.7))
    assert (call.inputs, call.outputs) == (SEQUENCE, ("prox_logprobs",))
    assert "prox_logprobs" in graph["actor_train"].inputs
    assert graph.nx_graph.has_edge("actor_forward", "actor_train")
    changed = ("actor_forward", "actor_train")
    others = {name: keys for name, keys in _keys(graph).items() if name not in changed}
    assert others == {name: keys for name, keys in TODAY[kind].items() if name not in changed}
    lagged = _experiment(kind, loss=RECOMPUTED, max_lag=1)
    assert "actor_forward" in lagged.parts(lagged.graph())["score"]


@pytest.mark.parametrize("kind", TODAY)
@pytest.mark.parametrize(
    "fields, limit",
    [
        ({"max_lag": 2}, AgeLimit(None, "mask")),
        ({"loss": PolicyLossConfig(max_age=0)}, AgeLimit(0, "mask")),
        ({"max_lag": 2, "loss": PolicyLossConfig(max_age=1, aged="drop")}, AgeLimit(1, "drop")),
        ({"max_lag": 2, "rounds": 3, "loss": PolicyLossConfig(max_age=0)}, AgeLimit(0, "mask")),
    ],
)
def test_versions_are_recorded_where_ages_matter(kind, fields, limit):
    experiment = _experiment(kind, **fields)
    graph = experiment.graph()
    assert graph["actor_generate"].outputs == (*SEQUENCE, "gen_logprobs", "finished", "versions")
    assert graph["advantages"].inputs[-1] == "versions"
    assert graph["advantages"].work.function.inputs.age_limit == limit
    assert experiment.eval_graph()["actor_generate"].outputs == (*SEQUENCE, "gen_logprobs", "finished")
    if experiment.max_lag:
        assert "advantages" in experiment.parts(graph)["score"]


def test_an_age_that_no_token_can_have_is_refused():
    experiment = _experiment("grpo", max_lag=2, loss=PolicyLossConfig(max_age=0))
    with pytest.raises(ValueError, match="loss.max_age is 0: with max_lag 2 and rounds 2, tokens are at"):
        experiment.graph()


def test_supervised_graphs_have_no_such_calls():
    assert list(_keys(SFT().graph())) == ["actor_train"]
    assert list(_keys(RewardModel().graph())) == ["reward_train"]


@pytest.mark.parametrize("kind", TODAY)
def test_the_top_entropy_is_found_before_the_update(kind):
    graph = _experiment(kind, loss=PolicyLossConfig(average="token", top_entropy_quantile=0.2)).graph()
    assert graph["actor_forward"].outputs == ("prox_logprobs", "prox_entropy")
    assert graph["actor_forward"].work == LogProbs(temperature=1.0, entropy=True)
    assert "prox_entropy" in graph["advantages"].inputs
    assert "prox_logprobs" not in graph["actor_train"].inputs


@pytest.mark.parametrize("kind", TODAY)
def test_mini_batches_are_shuffled_alike_for_all_that_train(kind):
    graph = _experiment(kind, shuffle_minibatches=True, minibatches=2, epochs=3, seed=5).graph()
    works = [call.work for call in graph.of_kind("train_step")]
    assert all((work.shuffle_minibatches, work.seed, work.repeats) == (True, 5, 1) for work in works)
    assert all(work.optimizer_steps == 6 for work in works)


@pytest.mark.parametrize(("changes", "sentence"), [
    ({"shuffle_minibatches": True, "minibatches": 1},
     "shuffle_minibatches is True and changes nothing, as minibatches is 1"),
    ({"loss": PolicyLossConfig(mask_truncated=True), "sampling": SamplingConfig(ignore_eos=True)},
     "all of them count as cut and nothing is learned"),
    ({"loss": PolicyLossConfig(off_policy_mask_threshold=0.0)}, "values such as 0.1 are usual"),
])
def test_settings_that_are_probably_not_meant(changes, sentence):
    assert any(sentence in doubt for doubt in _experiment("grpo", **changes).doubts())
    assert not any(sentence in doubt for doubt in _experiment("grpo").doubts())
