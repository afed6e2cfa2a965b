"""Tries an experiment's data for `realhf check`: tokenises rows, calls reward functions. Free of torch."""

import contextlib
import io
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from realhf.algorithms.advantages import SampleAdvantages
from realhf.calls import Generate, HostFunction, TrainStep, TurnSettings, is_own
from realhf.data.dataset import DatasetConfig
from realhf.data.light_tokenizer import LightTokenizer, unknown_token_id
from realhf.data.rows import count_rows
from realhf.data.tokenized import MixedRows, TokenizedRows, tokenize_parts
from realhf.environments.rollout_rewards import rewards_by_name
from realhf.environments.rollouts import EnvironmentTurnSourceFactory, play
from realhf.errors import UserError
from realhf.graph import DataflowGraph
from realhf.rewards.puzzles import ReasoningGym
from realhf.rewards.remote_judge import RemoteJudge
from realhf.rewards.reward import Reward, column_key, name_of
from realhf.rewards.scoring import RewardCall, RewardScores, SamplesToScore
from realhf.rewards.unit_tests import UnitTests
from realhf.runtime.compile.actions import spec_of
from realhf.runtime.compile.checks import check_lengths, check_vocabulary
from realhf.runtime.compile.eval_program import EvaluationProgram
from realhf.runtime.compile.program import Program
from realhf.runtime.doubts.rules import warnings_of
from realhf.signals import time_limit

_ROWS = 2000
"""Number of rows of a dataset that are tokenised."""
_SAMPLES = 4
"""Number of rows with which a reward function is called."""
_TRIAL_SECONDS = 120.0
"""Longest time of a trial of reward functions."""
_MAX_TRIAL_SECONDS = 20.0
"""Longest time that a second call of a reward function may take, by the time of the first."""
_RIGHT_FORMS = (
    "{}", "Let me see.\nThe answer is {}.", "So we have \\boxed{{{}}}.", "#### {}",
    "<think>\nLet me see.\n</think>\n<answer>\n{}\n</answer>")
"""Forms in which an answer may be expected."""
_ROUNDING = 1e-6
_SHARE = 2.0
_PERCENT = 20.0
"""A reward in percent differs by at least so much, and so many times a reward whose range is `_SHARE`."""
_OTHER_ANSWERS = ("I do not know.", "0")
"""Answers with which an environment is tried again that has failed with the first one."""
_MOST_TOOLS = 8
"""Tools of an environment that are called."""
_MAX_SHOWN = 600
"""Most characters of the first prompt that are shown; its middle is left out."""


class Trial(NamedTuple):
    """Warnings about the data, one sentence each; the other fields are None if the rows were not read."""

    warnings: list[str]
    num_rows: int | None = None
    first_prompt: "FirstPrompt | None" = None
    first_learned: "FirstLearned | None" = None
    """None also if completions are not learned."""
    played: "PlayedRollout | None" = None  # None also without an environment.


class FirstPrompt(NamedTuple):
    """The prompt of the first training row as the model reads it, special tokens included.

    With an environment it is the start of the rollout.
    """

    text: str
    tokens: int

    def __str__(self) -> str:
        return f"the first prompt has {self.tokens} token{'s' * (self.tokens != 1)}: {_printable(self.text)}"


class FirstLearned(NamedTuple):
    """The text of the first training row that is learned; ` ... ` stands for what is between its answers."""

    text: str
    tokens: int

    def __str__(self) -> str:
        are = "token is" if self.tokens == 1 else "tokens are"
        return f"{self.tokens} {are} learned of the first row: {_printable(self.text)}"


class PlayedRollout(NamedTuple):
    """A rollout in which the model always says the same; others call each tool once."""

    said: str
    start: list[int]
    """The tokens that the model reads first."""
    turns: int
    stop: str
    rewards: dict[str, float]
    called: tuple[str, ...] = ()

    def __str__(self) -> str:
        rewards = ", ".join(f"{name} {value:g}" for name, value in self.rewards.items())
        turns = f"{self.turns} turn{'s' * (self.turns != 1)}"
        return (
            f"the chat template is append-only; a rollout that always says {self.said!r} had {turns}, "
            f"stopped by {self.stop}, rewards: {rewards or 'none but 0'}"
            + (f"; others called {', '.join(self.called)} once" if self.called else ""))


def _printable(text: str) -> str:
    """Return a text in one line, as a string of Python shows it, without the middle of a long one."""
    is_plain = {c: c.isprintable() and c != "\\" for c in set(text)}
    shown = "".join(c if is_plain[c] else c.encode("unicode_escape").decode() for c in text)
    if len(shown) > _MAX_SHOWN:
        shown = f"{shown[: _MAX_SHOWN // 2]} ... {shown[-_MAX_SHOWN // 2 :]}"
    return shown


def try_out(program: Program) -> Trial:
    """Read rows and call reward functions as a run would. Raises ValueError if that would end every run."""
    directory = program.experiment.tokenizer_dir()
    if not directory:
        from realhf.distributed.world import own_device  # They need torch, as modules do.
        from realhf.runtime.execute.module_trial import try_functions

        tried = try_functions(program, plays=True, device=own_device(0))
        warnings = [*warnings_of(program, None, {}), *tried]
        return Trial(warnings, count_rows(program.experiment.dataset))
    if not (Path(directory) / "tokenizer.json").exists():
        untried = f"tokenizer {directory} has no tokenizer.json: neither data nor reward functions were tried"
        return Trial([*warnings_of(program, None, {}), untried])
    tokenizer = LightTokenizer(directory)
    check_vocabulary(program.roles, tokenizer.largest_id, tokenizer=directory)
    experiment = program.experiment
    rows = _rows(program, experiment.dataset, "dataset", program.graph, tokenizer)
    held_out = {
        eval_set.name: _rows(program, eval_set.evaluation.dataset, eval_set.field, eval_set.graph, tokenizer)
        for eval_set in program.evaluations}
    warnings = warnings_of(program, rows, held_out)
    warnings += _try_rewards(program, rows, held_out)
    warnings += _try_losses(program, rows, directory)
    played = _play(program, rows, warnings, tokenizer)
    ids = rows.parts[0].rows[0]["prompt_ids"] if played is None else played.start
    first = FirstPrompt(tokenizer.decode(ids), len(ids))
    learned = _first_learned(rows.parts[0].rows[0], program.graph, tokenizer)
    return Trial(warnings, sum(part.num_in_file for part in rows.parts), first, learned, played)


def _play(
    program: Program, rows: MixedRows, warnings: list[str], tokenizer: LightTokenizer
) -> PlayedRollout | None:
    """Play a rollout with the environment of the graph, if there is one; add to the warnings.

    Raises UserError if its chat template is not append-only, or if the environment does not start, fails
    whatever the model says, hangs, or ends its process.
    """
    answering = [
        (call, call.work) for call in program.graph.of_kind("generate")
        if isinstance(call.work, Generate) and call.work.environment is not None]
    if not answering:
        return None
    call, work = answering[0]
    assert call.role is not None and isinstance(work.environment, EnvironmentTurnSourceFactory)
    config = spec_of(program.roles[call.role].config()).config
    row = rows.parts[0].rows[0]
    said = _known_answer(row) or "1"
    settings = TurnSettings(
        work.seed, work.sampling.max_new_tokens, config.context_tokens, config.eos_token_ids)
    seen = {key: row[key] for key in call.inputs[1:]}
    began = time.monotonic()
    rollout = play(work.environment, seen, said, settings)
    is_quick = time.monotonic() - began < _MAX_TRIAL_SECONDS
    failure = f"the environment has ended with {rollout['stop']}: {rollout['sentence']}"
    if rollout["sentence"]:
        if len(rollout["messages"]) == 0 or rollout["stop"] in ("step_timeout", "worker_lost"):
            raise UserError(failure)
        others = [play(work.environment, seen, text, settings) for text in _OTHER_ANSWERS]
        if all(other["sentence"] for other in others):
            answers = ", ".join(map(repr, _OTHER_ANSWERS))
            raise UserError(f"{failure}; check answered {said!r}, and then {answers}: each rollout failed")
        warnings.append(f"{failure}; check always answered {said!r}")
    elif is_quick:
        warnings.extend(_other_answers(rollout, play(work.environment, seen, said, settings)))
    warnings.extend(rollout["notes"])
    warnings.extend(_unknown_text(rollout, tokenizer))
    called = []
    if rollout["calls"] and work.environment.environment.max_turns == 1:
        warnings.append("environment.max_turns is 1: the model never reads what a tool has answered")
    for tool, tokens in list(rollout["calls"].items())[:_MOST_TOOLS]:
        if len(tokens) > settings.max_new_tokens:
            warnings.append(
                f"a call of the tool {tool} has {len(tokens)} tokens, and sampling.max_new_tokens is "
                f"{settings.max_new_tokens}: the model cannot make it")
            continue
        called.append(tool)
        after = play(work.environment, seen, said, settings, tool=tool)
        if after["sentence"]:
            warnings.append(
                f"the environment has ended with {after['stop']}: {after['sentence']}; check called {tool} "
                f"with made-up arguments: {tokenizer.decode(tokens)}")
            if after["stop"] in ("step_timeout", "worker_lost"):
                break
    return PlayedRollout(
        said, rollout["start"], len(rollout["turns"]), rollout["stop"], rewards_by_name(rollout),
        tuple(called))


def _other_answers(first: Mapping[str, Any], again: Mapping[str, Any]) -> Iterator[str]:
    """Yield a warning if two rollouts of one row and seed differ, in which the model said the same."""
    what = next((what for what in ("messages", "stop") if first[what] != again[what]), None)
    rewards = [[turn["rewards"] for turn in rollout["turns"]] for rollout in (first, again)]
    if what is None and rewards[0] != rewards[1]:
        what = "rewards"
    if what is not None:
        yield (
            f"the {what} of a rollout were others when check played it again, with the same row and seed: "
            "what an environment does must follow from these and from the model's messages, or a run cannot "
            "be repeated or resumed")


def _unknown_text(rollout: Mapping[str, Any], tokenizer: LightTokenizer) -> Iterator[str]:
    """Yield a warning if an environment's messages have text that the tokenizer does not know."""
    unknown_id = unknown_token_id(tokenizer)
    said = [i for turn in rollout["turns"] for i in range(turn["start"], turn["stop"])]
    tokens = [token for i, token in enumerate(rollout["tokens"]) if i not in said]
    if unknown_id is None or unknown_id not in tokens:
        return
    texts = [str(message["content"]) for message in rollout["messages"] if message["role"] != "assistant"]
    unknown = [char for char in sorted(set("".join(texts))) if unknown_id in tokenizer.encode(char)]
    shown = f", such as {unknown[0]!r}" if unknown else ""
    yield (
        f"the tokenizer does not know all that the environment said when check played it{shown}: the model "
        f"reads {tokens.count(unknown_id)} unknown tokens")


def _first_learned(
    row: dict[str, Any], graph: DataflowGraph, tokenizer: LightTokenizer
) -> FirstLearned | None:
    """Return what of a row is learned; None if the graph does not learn the completions of rows."""
    if "response_mask" not in graph.inputs:
        return None
    pairs = zip(row["sequence_ids"], row["response_mask"], strict=True)
    ranges = [[token for token, _ in run] for mask, run in groupby(pairs, key=itemgetter(1)) if mask]
    text = " ... ".join(map(tokenizer.decode, ranges))
    return FirstLearned(text, sum(map(len, ranges)))


def _try_losses(program: Program, rows: MixedRows, tokenizer: str) -> list[str]:
    """Call losses and advantages that the user has written with made-up samples; return warnings."""
    has_own = any(is_own(work.loss) for work in program.graph.works(TrainStep)) or any(
        isinstance(work.function, SampleAdvantages) and work.function.function is not None
        for work in program.graph.works(HostFunction))
    if not program.parts or not has_own:
        return []
    from realhf.cli.loss_trial import try_losses  # It needs torch, as the user's loss does.

    trained = {call.role for call in program.graph.of_kind("train_step")}
    vocabulary = min(role.config().vocab_size for name, role in program.roles.items() if name in trained)
    try:
        return list(try_losses(
            program.graph, rows.parts[0].samples[:_SAMPLES], group_size=program.experiment.group_size,
            vocabulary=vocabulary, tokenizer=tokenizer))
    except UserError:
        raise
    except Exception:  # What is made up may not suit a host function; then the run tries the loss.
        return []


def _try_rewards(program: Program, rows: MixedRows, held_out: Mapping[str, MixedRows]) -> list[str]:
    """Call each reward function with rows of each data set that it scores; return warnings."""
    rewards: dict[Any, tuple[str, RewardCall, TokenizedRows, list[EvaluationProgram]]] = {}
    sets: list[tuple[str, DataflowGraph, MixedRows, list[EvaluationProgram]]] = [
        ("", program.graph, rows, [])]
    sets += [(eval_set.field, eval_set.graph, held_out[eval_set.name], [eval_set])
             for eval_set in program.evaluations]
    for field, graph, of_set, eval_sets in sets:
        for work in graph.works(HostFunction):
            if isinstance(reward := work.function, RewardCall):
                functions = tuple(id(part.function) for part in reward.rewards)
                for part in of_set.parts:
                    known = rewards.setdefault((functions, part.config.path), (field, reward, part, []))
                    known[-1].extend(eval_sets)
    warnings: list[str] = []
    tried: set[Any] = set()
    for (functions, _), (field, reward, part, judging) in rewards.items():
        try:
            warnings += _try_reward(reward, part, judging, is_quiet=functions in tried)
            tried.add(functions)
        except UserError as error:
            raise UserError(f"{field}: {error}" if "." in field else str(error)) from error
    by_reward = {sentence.partition(" gives right answers")[0]: sentence for sentence in reversed(warnings)}
    return list(reversed(by_reward.values()))


def _rows(
    program: Program, config: DatasetConfig, name: str, graph: DataflowGraph, tokenizer: LightTokenizer
) -> MixedRows:
    """Tokenise a sample of the rows, or all of them if every prompt of the sample is too long."""
    try:
        try:
            rows = tokenize_parts(config, keys=graph.inputs, tokenizer=tokenizer, sample=_ROWS)
        except UserError:
            rows = tokenize_parts(config, keys=graph.inputs, tokenizer=tokenizer)
        check_lengths(program.roles, graph, rows)
    except ValueError as error:
        raise UserError(f"{name}{str(error).removeprefix('dataset')}") from error
    return rows


def _try_reward(
    reward: RewardCall, rows: TokenizedRows, judging: Sequence[EvaluationProgram], *, is_quiet: bool
) -> list[str]:
    """Call reward functions with made-up completions: the rows' answers or prompts, and an empty text.

    A function is called again with answers in other forms if its values are all equal, or if they seem not to
    suit the limit by which an evaluation of `judging` tells right answers. Return a warning for each for
    which that is so then, too, and for each whose values are others if it is called again with the same.
    With `is_quiet`, print nothing of what the functions print, as they have been tried before.
    """
    chosen = _chosen(rows, [column_key(name) for name in reward.columns])
    samples = [rows.rows[i] for i in chosen]
    texts = [_made_up(sample) for sample in samples]
    texts[-1] = "" if len(texts) > 1 else texts[-1]
    start = time.monotonic()
    scores = _scores(reward, rows, samples, texts, is_quiet=is_quiet)
    seconds = (time.monotonic() - start) / len(texts)
    warnings = []
    ranges: dict[str, float] = {}
    for part in reward.rewards:
        if type(part.function) in (ReasoningGym, RemoteJudge, UnitTests):
            continue
        alone = RewardCall(part, reward.columns, reward.limits)
        values = [row[part.label] for row in scores.by_name]
        if seconds * len(texts) <= _MAX_TRIAL_SECONDS and not _is_shipped(part.function):
            again = _scores(alone, rows, samples, texts, is_quiet=True)
            repeated = [row[part.label] for row in again.by_name]
            if values != repeated:
                warnings.append(_does_not_repeat(name_of(part.function), values, repeated))
        if part.weight != 0 and not _is_shipped(part.function):
            at_most = int(_MAX_TRIAL_SECONDS / max(seconds, 1e-9))
            wrong_way, more_values = _backwards(alone, part, rows, at_most=at_most)
            warnings += wrong_way
            ranges[part.label] = abs(part.weight) * _range([*values, *more_values])
        judges = [eval_set for eval_set in judging if eval_set.deciding == part.label]
        applies = None not in values or len(reward.rewards) == 1  # None may leave a row to other rewards.
        is_equal = applies and len(set(values)) == 1 and part.weight != 0
        forms = [(sample, text) for sample in samples[:2] for text in _forms(sample)]
        is_quick = seconds * len(forms) <= _MAX_TRIAL_SECONDS
        if not is_quick or not (is_equal or any(eval_set.doubt(values) for eval_set in judges)):
            continue
        more = _scores(alone, rows, [sample for sample, _ in forms], [text for _, text in forms])
        values += [row[part.label] for row in more.by_name]
        if is_equal and len(set(values)) == 1:
            warnings.append(_never_differs(name_of(part.function), values, samples[0]["prompt"]))
        elif _known_answer(samples[0]) is not None:
            doubts = filter(None, (eval_set.doubt(values) for eval_set in judges))
            warnings += [f"{doubt} (of completions that check made up)" for doubt in doubts]
    return [*warnings, *_other_scales(ranges)]


def _range(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return max(known) - min(known) if known else 0.0


def _other_scales(ranges: Mapping[str, float]) -> Iterator[str]:
    """Yield a warning if one of several rewards surely counts in percent, and another one in shares."""
    small = {name: size for name, size in ranges.items() if 0 < size <= _SHARE}
    for name, size in ranges.items():
        least = min(small, key=small.__getitem__, default=None)
        if least is not None and size >= max(_PERCENT, _PERCENT * small[least]):
            yield (
                f"rewards {name} and {least} have other scales: for the same completions the first differs "
                f"by up to {size:g} and the second by {small[least]:g}, which hardly counts; give them "
                "weights, Reward(f, weight=...), or divide")


def _backwards(
    reward: RewardCall, part: Reward, rows: TokenizedRows, *, at_most: int
) -> tuple[list[str], list[float]]:
    """Return a warning if a reward gives right answers less than the right answers of another row, and the
    values on which that rests.

    Two rows are scored with both answers, each in several forms. What depends on the text alone, such as its
    length or form, is the same in both differences and cancels out.
    """
    known = [(sample, text) for sample in rows.rows[:_ROWS] if (text := _known_answer(sample)) is not None]
    others = [pair for pair in known[1:] if pair[1] not in known[0][1] and known[0][1] not in pair[1]]
    count = min(len(_RIGHT_FORMS), at_most // 4)
    if not others or not count:
        return [], []
    (first, right), (second, wrong) = known[0], others[0]
    forms = _RIGHT_FORMS[:count]
    texts = [form.format(answer) for form in forms for answer in (right, wrong, wrong, right)]
    samples = [sample for _ in forms for sample in (first, first, second, second)]
    scores = _scores(reward, rows, samples, texts, is_quiet=True)
    values = [row[part.label] or 0.0 for row in scores.by_name]
    gains = []
    for i in range(0, len(values), 4):
        own_first, other_first, own_second, other_second = values[i : i + 4]
        gains.append(part.weight * (own_first + own_second - other_first - other_second))
    worst = min(range(len(gains)), key=gains.__getitem__)
    if gains[worst] > -_ROUNDING or max(gains) > _ROUNDING:
        return [], values
    own, other, other_right, _ = values[4 * worst : 4 * worst + 4]
    turn = "" if part.weight > 0 else f", with the weight {part.weight:g},"
    return [
        f"reward {part.label} gives right answers{turn} less than wrong ones: {own:g} for "
        f"{texts[4 * worst]!r} and {other:g} for {texts[4 * worst + 1]!r}, where the row's answer is "
        f"{right!r}, and {other_right:g} for the latter where it is right: a higher reward must be better; "
        "turn its sign"
    ], values


def _is_shipped(function: Any) -> bool:
    return type(function).__module__.partition(".")[0] == __name__.partition(".")[0]


def _does_not_repeat(
    name: str, values: Sequence[float | None], repeated: Sequence[float | None]
) -> str:
    if Counter(values) == Counter(repeated):
        return (
            f"reward function {name} returned the same values in another order when check called it again "
            "with the same completions: scores go to other samples than their own; value i must be that of "
            "completion i (asyncio.gather and map keep the order, as_completed does not)")
    return (
        f"reward function {name} returned other values when check called it again with the same completions: "
        "a run that is repeated or resumed has other rewards")


def _never_differs(name: str, values: Sequence[float | None], prompt: Any) -> str:
    """Return the warning about a reward function whose values are all equal."""
    form = "" if isinstance(prompt, str) else (
        "; completions of chats are lists of messages, as in TRL: the text is completion[-1]['content']")
    value = "None" if values[0] is None else f"{values[0]:g}"
    return (
        f"reward function {name} returned {value} for all {len(values)} completions that check made "
        "up, among them the rows' answers alone, in a sentence, in \\boxed{}, in <answer> tags and in code: "
        f"nothing is learned from a reward that never differs{form}")


def _scores(
    reward: RewardCall, rows: TokenizedRows, samples: Sequence[dict[str, Any]], texts: list[str],
    *, is_quiet: bool = False,
) -> RewardScores:
    """Call reward functions with a completion for each of these samples; `is_quiet`: print nothing."""
    end = [rows.tokenizer.eos_token_id or 0]
    ids = [rows.tokenizer.encode(text, add_special_tokens=False) + end for text in texts]
    columns = {name: [sample[column_key(name)] for sample in samples] for name in reward.columns}
    prompts = [sample["prompt"] for sample in samples]
    names = ", ".join(scored.label for scored in reward.rewards)

    def too_long() -> UserError:
        return UserError(f"the rewards ({names}) have not returned within {_TRIAL_SECONDS:g} s")

    try:
        # Standard output is for the command's own answer.
        shown = io.StringIO() if is_quiet else sys.stderr
        with (contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown),
              time_limit(_TRIAL_SECONDS, too_long)):
            return reward.scored(SamplesToScore(range(len(samples)), prompts, texts, ids, columns))
    except UserError as error:
        made_up = ", ".join(repr(text[:40]) for text in texts[:_SAMPLES])
        made_up += f" and {len(texts) - _SAMPLES} others" if len(texts) > _SAMPLES else ""
        raise UserError(f"{error}; check called it with the made-up completions {made_up}") from error


def _chosen(rows: TokenizedRows, keys: list[str]) -> list[int]:
    """Return the indices of the first, middle and last row, and of one with a null in a column of `keys`."""
    null = [i for i, row in enumerate(rows.rows) if any(row[key] is None for key in keys)][:1]
    last = len(rows.rows) - 1
    return list(dict.fromkeys([*null, 0, last // 2, last]))[:_SAMPLES]


def _made_up(sample: dict[str, Any]) -> str:
    answer = _known_answer(sample)
    return _prompt_text(sample) if answer is None else answer


def _known_answer(sample: dict[str, Any]) -> str | None:
    values = (sample.get(key) for key in ("answer", "ground_truth", "solution"))
    return next((str(value) for value in values if isinstance(value, str | int | float)), None)


def _prompt_text(sample: dict[str, Any]) -> str:
    prompt = sample["prompt"]
    return prompt if isinstance(prompt, str) else str(prompt[-1].get("content"))


def _forms(sample: dict[str, Any]) -> list[str]:
    """Return the answer to a sample in many forms, and texts that are no answers."""
    answer = _made_up(sample)
    return [
        answer, f"Let me see.\nThe answer is {answer}.", f"So we have \\boxed{{{answer}}}.", f"#### {answer}",
        f"<think>\nLet me see.\n</think>\n<answer>\n{answer}\n</answer>", f"<think>Hm.</think>{answer}",
        f"```python\n{answer}\n```", f'{{"answer": "{answer}"}}', f"{_prompt_text(sample)} {answer}",
        "I do not know. " * 100, "Yes", "No", "A", "0", "1"]
