"""Names of options in other libraries, and what they are called here."""

from dataclasses import fields

from trl import DPOConfig, GRPOConfig, RLOOConfig, SFTConfig

from realhf import DPO, GRPO, KTO, PPO, Evaluation, LoraConfig, OptimizerConfig, Role
from realhf.cli.main import make_parser
from realhf.cli.overrides import _options
from realhf.user_input.other_libraries import OTHER_NAMES, keyword_hint, ours
from realhf.user_input.suggest import near_options

OPTIONS = list(
    _options(GRPO(eval_dataset=Evaluation())) | _options(PPO(critic=Role("m", optimizer=OptimizerConfig())))
    | _options(DPO()) | _options(KTO()))
IN_TRL = {field.name for kind in (GRPOConfig, SFTConfig, DPOConfig, RLOOConfig) for field in fields(kind)}


def _of_run() -> set[str]:
    """Return the options of `realhf run`."""
    options, _ = make_parser().parse_known_args(["run"])
    return {f"--{name.replace('_', '-')}" for name in vars(options)}


def test_our_names_exist():
    of_run = _of_run()
    for name, found in OTHER_NAMES.items():
        assert found.options or found.instead, name
        for end in found.options:
            ends = f".{end.replace('_', '-')}"
            known = end in of_run if end.startswith("--") else any(
                f".{option.removeprefix('--')}".endswith(ends) for option in OPTIONS)
            assert known, f"{name}: {end}"


def test_none_of_the_other_names_is_ours():
    """An option of ours that another library calls so, too, means the same in both."""
    same = {name for name in OTHER_NAMES if f"--{name.replace('_', '-')}" in OPTIONS}
    assert same == set()


def test_most_options_of_trl_have_an_answer():
    own = {field.name for kind in (GRPOConfig, RLOOConfig) for field in fields(kind)} - {
        field.name for field in fields(SFTConfig)}  # What is about answers, and not about any training.
    ours_too = {option.rpartition(".")[2].removeprefix("--").replace("-", "_") for option in OPTIONS}
    answered = {name for name in own if ours(name) is not None or name in ours_too}
    assert len(answered) >= 0.6 * len(own), sorted(own - answered)
    assert len(IN_TRL & OTHER_NAMES.keys()) >= 45


def test_the_longest_name_counts():
    assert ours("trainer.test-freq") == ours("test_freq") == OTHER_NAMES["test_freq"]
    assert ours("a.critic.optim.lr").options == ("critic.optimizer.lr",)
    assert ours("a.optim.lr").options == ("optimizer.lr",)
    assert ours("vllm_anything").instead.startswith("not needed")
    assert ours("anything") is None and keyword_hint("anything", ["thing"]) == ""
    legal = [field.name for field in fields(LoraConfig)]
    assert keyword_hint("r", legal) == "did you mean rank?"


def test_near_options_differ_little_in_each_part():
    options = ["actor.optimizer.lr", "actor.optimizer.eps", "steps", "sampling.stop", "sampling.top-k"]
    assert near_options("actor.optimizer.lrr", options) == ["actor.optimizer.lr"]
    assert near_options("actor.optimizer.foo", options) == []
    assert near_options("actor.optimzer.lr", options) == ["actor.optimizer.lr"]
    assert near_options("step", options) == ["steps"]
    assert near_options("actor.optimizer", options) == ["actor.optimizer.lr", "actor.optimizer.eps"]
    assert near_options("samplin.stopp", options) == ["sampling.stop"]
