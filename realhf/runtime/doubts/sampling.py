"""Doubts about how responses are drawn and where they end."""

import re
from collections.abc import Iterator
from itertools import compress

from realhf.calls import Generate, SamplingConfig
from realhf.data.tokenized import TokenizedRows
from realhf.experiment import named_sets
from realhf.graph import DataflowGraph
from realhf.runtime.compile.checks import unknown_turn_end
from realhf.runtime.compile.program import Program

_LOW_TOP_P = 1e-5
"""So low a top_p draws one token only, as the most probable one has at least the share 1 / vocabulary."""
_ESCAPE = re.compile(r"\\([ntr])(?![A-Za-z])")
"""A backslash and a letter, not the beginning of a word of LaTeX such as `\\nabla`."""
_CHANGES_LOGITS = (
    "logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty", "bad_words", "bad_word_ids",
    "min_new_tokens")
"""Settings by which samples are drawn from another distribution than the model's."""
_HIGH_TEMPERATURE = 2.5
_LOW_TEMPERATURE = 0.05


def random_samples(program: Program) -> Iterator[str]:
    """Yield warnings about a temperature at which answers have no sense."""
    for sampling in (work.sampling for work in program.graph.works(Generate)):
        if sampling.temperature > _HIGH_TEMPERATURE:
            yield (
                f"sampling.temperature is {sampling.temperature:g}: answers are nearly random tokens "
                "(0.6 to 1.2 is usual)")


def equal_samples(program: Program) -> Iterator[str]:
    """Yield warnings about sampling that draws the same answer for all samples of a prompt.

    A model that is not trained beside one that is, such as a judge, may answer greedily.
    """
    count = program.experiment.group_size
    trained = {call.role for call in program.graph.of_kind("train_step")}
    calls = [call for call in program.graph.of_kind("generate") if call.role in trained or not trained]
    for sampling in (call.work_as(Generate).sampling for call in calls if count > 1):
        if (why := _one_token(sampling)) is not None:
            yield f"sampling.{why}: the {count} samples of a prompt are all the same"
        elif sampling.temperature < _LOW_TEMPERATURE:
            yield (
                f"sampling.temperature is {sampling.temperature:g}: the {count} samples of a prompt are "
                "nearly all the same")


def _one_token(sampling: SamplingConfig) -> str | None:
    """Return the setting by which only the most probable token is ever drawn, as words; None if there is
    none."""
    if sampling.temperature == 0:
        return "temperature is 0"
    if sampling.top_k == 1:
        return "top_k is 1"
    if sampling.min_p == 1:
        return "min_p is 1"
    return f"top_p is {sampling.top_p:g}" if sampling.top_p <= _LOW_TOP_P else None


def written_escapes(program: Program) -> Iterator[str]:
    """Yield warnings about texts with a backslash and a letter where a line break or tab was surely meant."""
    for work in program.graph.works(Generate):
        for field in ("stop", "bad_words"):
            for text in getattr(work.sampling, field):
                if (found := _ESCAPE.search(text)) is not None:
                    yield (
                        f"sampling.{field} has {text!r}, a backslash and the letter {found[1]}: a line break "
                        f"or tab is \"\\{found[1]}\" in Python and $'\\{found[1]}' in a shell")


def off_policy(program: Program) -> Iterator[str]:
    """Yield warnings about settings by which a model trains on samples of another distribution."""
    trained = program.graph.roles("train_step")
    for call in program.graph.of_kind("generate"):
        sampling = call.work_as(Generate).sampling
        plain = type(sampling)()
        changed = [name for name in _CHANGES_LOGITS if getattr(sampling, name) != getattr(plain, name)]
        if changed and sampling.temperature > 0 and call.role in trained:
            what = " and ".join(f"sampling.{name}" for name in changed)
            yield f"{what}: {call.role} trains on samples of another distribution than its log-probs tell"


def coarse_weights(program: Program) -> Iterator[str]:
    """Yield warnings about samples of weights in int8 whose importance weights nothing limits."""
    loss = getattr(program.experiment, "loss", None)
    in_int8 = any(work.generation_weights == "int8" for work in program.graph.works(Generate))
    if in_int8 and getattr(loss, "importance_cap", 0) is None and getattr(loss, "max_age", 0) is None:
        yield (
            "generation_weights is int8 and loss.importance_cap None: responses are sampled by a policy that "
            "differs from the trainer's, and nothing corrects or limits that; set loss.proximal to "
            "recomputed and loss.importance_cap to 2")


def ignored(program: Program, graph: DataflowGraph) -> Iterator[str]:
    """Yield warnings about settings of generation that only the native engine reads."""
    for call in graph.of_kind("generate"):
        if call.role is None or program.roles[call.role].engine != "transformers":
            continue
        names = ("kv_cache_gib", "prefill_tokens", "work_stealing", "cuda_graphs")
        if changed := [name for name in names if getattr(call.work, name) != getattr(Generate, name)]:
            yield f"{call.role}.engine is transformers, which does not have {' and '.join(changed)}"


def endless(program: Program, graph: DataflowGraph) -> Iterator[str]:
    """Yield warnings about answers that never end by themselves."""
    for call in graph.of_kind("generate"):
        sampling = call.work_as(Generate).sampling
        longest = sampling.max_new_tokens
        if sampling.min_new_tokens == longest and longest > 1:
            yield (
                f"sampling.min_new_tokens and max_new_tokens are both {longest}: no answer may end by "
                "itself, and all are cut at that length")
        has_stops = sampling.stop or sampling.stop_token_ids
        ends = has_stops or call.role is None or program.roles[call.role].config().eos_token_ids
        if not ends:
            yield (
                f"{call.role}.model has no eos_token_id in config.json or generation_config.json: "
                f"every answer runs to sampling.max_new_tokens {longest}")


def unknown_end(
    program: Program, graph: DataflowGraph, name: str, rows: TokenizedRows
) -> Iterator[str]:
    """Yield warnings about completions that end in a token at which the model's answers do not end."""
    if "response_mask" not in rows.keys:
        return
    for name_of_role in graph.roles():
        role = program.roles[name_of_role]
        eos_ids = role.config().eos_token_ids
        if (end := unknown_turn_end(role, program.experiment.tokenizer_dir())) is not None:
            eos_ids = (*eos_ids, end[0])
        ours = rows.tokenizer.eos_token_id
        last = [
            token for samples in rows.samples for sample in samples
            for token in list(compress(sample["sequence_ids"], sample["response_mask"]))[-4:]]
        ends = [token for token in last if token in eos_ids]
        if eos_ids and not ends:
            yield (
                f"{name}: no completion learns to end in one of the tokens {', '.join(map(str, eos_ids))}, "
                f"at which {name_of_role}.model stops (eos_token_id); the tokenizer's eos token is {ours}")


def ordinary_ends(
    program: Program, graph: DataflowGraph, name: str, rows: TokenizedRows
) -> Iterator[str]:
    """Yield warnings about tokens that end answers and stand for ordinary text, whatever the data set."""
    special = {*rows.tokenizer.added_tokens_decoder, rows.tokenizer.eos_token_id}
    for role in graph.roles("generate"):
        for token in program.roles[role].config().eos_token_ids:
            if token not in special and (text := rows.tokenizer.decode([token])):
                yield (
                    f"{role}.model stops at {token} (eos_token_id), which is {text!r}, an ordinary token: "
                    "every answer ends where it says that")


def unlike_training(program: Program) -> Iterator[str]:
    """Yield warnings about evaluations whose own sampling lacks what ends answers in training, or in which
    the samples of a prompt are equal."""
    training = getattr(program.experiment, "sampling", None)
    if not isinstance(training, SamplingConfig):
        return
    default = SamplingConfig()
    sets = named_sets(program.experiment.eval_dataset)
    for name, eval_set in sets.items():
        sampling = eval_set.sampling
        field = f"eval_dataset.{name}.sampling" if name else "eval_dataset.sampling"
        drawn = training if sampling is None else sampling
        if eval_set.samples > 1 and (why := _one_token(drawn)) is not None:
            where = "sampling" if sampling is None else field
            yield f"{where}.{why}: the {eval_set.samples} samples of a held-out prompt are all the same"
        if sampling is None:
            continue
        lost = [
            key for key in ("max_new_tokens", "stop", "stop_token_ids")
            if getattr(sampling, key) == getattr(default, key) != getattr(training, key)]
        if lost:
            values = " and ".join(f"{key} {getattr(sampling, key)!r}" for key in lost)
            ours = " and ".join(f"{getattr(training, key)!r}" for key in lost)
            yield (
                f"{field} has {values} by default, and training has {ours}: it takes nothing from training's "
                "sampling, so say what both have")
