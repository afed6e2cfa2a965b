"""Checks and warnings about the settings of sampling, and where answers end. Free of torch."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from realhf.data.sequence_tokens import end_of_turn
from realhf.data.token_texts import token_bytes, word_tokens
from realhf.experiment import Role
from realhf.graph import DataflowGraph, FunctionCall

_CHANGES_LOGITS = (
    "logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty", "bad_words", "bad_word_ids",
    "min_new_tokens")
"""Settings by which samples are drawn from another distribution than the model's."""


def check_sampling(graph: DataflowGraph, roles: Mapping[str, Role]) -> None:
    """Raise ValueError if a generating call has a token that its model does not have, or if its texts cannot
    be read by its tokenizer."""
    for call in graph.of_kind("generate"):
        if call.role is not None:
            _check_tokens(call, roles[call.role])


def _check_tokens(call: FunctionCall, role: Role) -> None:
    sampling = call.work.sampling
    size = role.config().vocab_size
    named = list(sampling.token_ids)
    if sampling.reads_text:
        try:
            words = word_tokens(call.work.tokenizer, sampling.bad_words)
            token_bytes(call.work.tokenizer)
        except ValueError as error:
            field = "bad_words" if sampling.bad_words else "stop"
            raise ValueError(f"sampling.{field} needs the tokenizer: {error}") from error
        named += [("bad_words", token) for word in words for token in word]
    for name, token in named:
        if token >= size:
            raise ValueError(
                f"sampling.{name} has the token {token}: it must be below {size}, "
                f"as the vocabulary of {call.role} has {size} tokens")


def unknown_turn_end(role: Role, tokenizer: str) -> tuple[int, str] | None:
    """Return the token with which the tokenizer's chat template ends turns, and its text, if the files of the
    role's model do not name it as a token that ends answers, else None."""
    config = role.config()
    end = end_of_turn(tokenizer)
    is_unknown = end is not None and end[0] not in config.eos_token_ids and end[0] < config.vocab_size
    return end if is_unknown else None


def ending_with_turns(graph: DataflowGraph, roles: Mapping[str, Role], tokenizer: str) -> DataflowGraph:
    """Return the graph with answers that also end at the token with which the chat template ends turns."""
    changed = []
    for call in graph.of_kind("generate"):
        sampling = call.work.sampling
        if call.role is None or sampling.ignore_eos:
            continue
        end = unknown_turn_end(roles[call.role], tokenizer)
        if end is not None and end[0] not in sampling.stop_token_ids:
            sampling = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, end[0]))
            changed.append(replace(call, work=replace(call.work, sampling=sampling)))
    return graph.replace(*changed)


def turn_end_warnings(graph: DataflowGraph, roles: Mapping[str, Role], tokenizer: str) -> Iterator[str]:
    """Yield a warning for each model that is trained or answers and does not know how turns end."""
    calls = [*graph.of_kind("generate"), *graph.of_kind("train_step")]
    for name in sorted({call.role for call in calls if call.role is not None}):
        role = roles[name]
        end = unknown_turn_end(role, tokenizer) if role.head == "lm" else None
        if end is not None:
            ids = role.config().eos_token_ids
            stops = f"stops at {', '.join(map(str, ids))} (eos_token_id)" if ids else "has no eos_token_id"
            yield (
                f"{name}.model {stops}, but the chat template ends turns with the token {end[0]} ({end[1]}): "
                "answers end there, too, and exports name it in generation_config.json")


def off_policy(graph: DataflowGraph) -> Iterator[str]:
    """Yield warnings about settings by which a model trains on samples of another distribution."""
    trained = {call.role for call in graph.of_kind("train_step")}
    for call in graph.of_kind("generate"):
        sampling = call.work.sampling
        plain = type(sampling)()
        changed = [name for name in _CHANGES_LOGITS if getattr(sampling, name) != getattr(plain, name)]
        if changed and sampling.temperature > 0 and call.role in trained:
            what = " and ".join(f"sampling.{name}" for name in changed)
            yield f"{what}: {call.role} trains on samples of another distribution than its log-probs tell"
