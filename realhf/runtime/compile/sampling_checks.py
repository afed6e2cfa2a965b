"""Checks and warnings about the settings of sampling. Free of torch."""

from collections.abc import Iterator, Mapping

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
