"""Doubts about chat templates: those of models and tokenizers, and what they make of rows."""

import re
from collections.abc import Iterator

from realhf.data.light_tokenizer import chat_template_of, files_of_templates
from realhf.data.sequence_tokens import end_of_turn, missing_beginning, special_texts, spelled_end
from realhf.data.tokenized import TokenizedRows
from realhf.graph import DataflowGraph
from realhf.runtime.compile.program import Program


def two_templates(program: Program) -> Iterator[str]:
    """Yield a warning about a tokenizer's directory that has different chat templates in two files."""
    tokenizer = program.experiment.tokenizer_dir()
    (first, template), *others = [*files_of_templates(tokenizer).items()] or [("", "")]
    for file, other in others:
        if other.strip() != template.strip():
            yield (
                f"tokenizer {tokenizer} has a chat template in {first} and another in {file}: the former is "
                "read, as by transformers; remove the one that is not meant")


def other_templates(program: Program) -> Iterator[str]:
    """Yield warnings about models with another chat template than the one that writes the chats."""
    ours = chat_template_of(program.experiment.tokenizer_dir())
    for name, role in program.roles.items():
        theirs = None if role.random_init else chat_template_of(str(role.model_path()))
        if ours is not None and theirs is not None and ours != theirs:
            yield (
                f"{name}.model {role.model} has another chat template than the tokenizer "
                f"{program.experiment.tokenizer_dir()}, by which the chats are written that it reads: take a "
                "model that has learned from chats in that form, or one tokenizer for both")
_ODDITIES = {
    "num_unlike_prompt": (
        "in {} rows the chat template writes another beginning with the completion than for the prompt "
        "alone; the loss counts from the first token that differs"),
    "num_rewritten": (
        "in {} rows the chat template writes answers in another way when messages follow (many leave out "
        "earlier reasoning); the model learns what the whole chat has"),
    "num_torn": (
        "in {} rows a token would span the end of the prompt and the beginning of the completion, as after a "
        "space at the end: they are tokenised apart, as answers are drawn"),
    "num_special": (
        "in {} rows messages have special tokens in what they say, which the model reads as if the chat "
        "template had written them"),
    "num_left_out": (
        "in {} rows the chat template does not write all that messages say: it may not know a role, or "
        "content that is a list of parts"),
    "num_lists": (
        "in {} rows the chat template writes the list of a message's parts as Python shows it, because it "
        "only knows content that is text: give that"),
    "num_thoughtless": (
        "in {} rows the chat template does not write the reasoning of the last answer (in <think> tags, or "
        "in a key of its own), so that it is not learned: change the template, or leave the reasoning out"),
    "num_quoted": (
        "in {} rows the arguments of tool calls are JSON text, which the chat template quotes once more: "
        "store them as objects"),
    "num_questions": (
        "{} rows are whole conversations: their prompts are the messages up to the user's last one, and the "
        "answers in the rows are not read"),
    "num_continued": (
        "{} prompts end with a message of the assistant, which answers continue: leave it out if it is an "
        "answer by itself"),
}
"""Count of rows whose tokens are not what one may expect -> the warning about it."""


def unlike_template(name: str, rows: TokenizedRows) -> Iterator[str]:
    """Yield warnings about rows whose tokens are not what one may expect."""
    for field, sentence in _ODDITIES.items():
        if count := getattr(rows.oddities, field):
            yield f"{name}: {sentence.format(count)}"
    for key, count in rows.oddities.unread.items():
        yield (
            f"{name}: in {count} rows messages have the key {key!r}, which nothing reads, the chat template "
            "included: it changes nothing")


def unused_settings(name: str, rows: TokenizedRows) -> Iterator[str]:
    """Yield warnings about settings of chats that change nothing, and a template that begins no answer."""
    config = rows.config
    chats = rows.counts.chats
    if not chats:
        return
    template = rows.tokenizer.get_chat_template(tools=list(config.tools) or None) or ""
    for setting, argument in [(f"chat_template_kwargs {key!r}", key) for key in config.chat_template_kwargs]:
        value = config.chat_template_kwargs[argument]
        if not re.search(rf"\b{re.escape(argument)}\b", template):
            yield f"{name}: {setting} changes nothing: the chat template does not read it"
        elif isinstance(value, str) and value.lower() in ("true", "false"):
            yield (
                f"{name}: {setting} is the text {value!r}, which a template takes for true: give "
                f"{value.capitalize()} without quotation marks")
    tools = "tools_key" if config.tools_key is not None else "tools" if config.tools else None
    if tools and rows.counts.with_tools and not re.search(r"\btools\b", template):
        yield f"{name}: {tools} changes nothing: the chat template does not write tools"
    if config.system_prompt is not None and rows.counts.own_systems == chats:
        yield f"{name}: system_prompt is never used: every prompt begins with a system message of its own"
    if (mark := spelled_end(rows.tokenizer, config.chat_template_kwargs)) is not None:
        size = len(rows.tokenizer.encode(mark, add_special_tokens=False))
        yield (
            f"{name}: the chat template ends turns with {mark}, no token of this tokenizer but {size} "
            "of them, so that no token ends an answer: the template seems to be another model's")
    if beginning := missing_beginning(rows.tokenizer, config.chat_template_kwargs):
        yield (
            f"{name}: the template ignores add_generation_prompt: prompts end before {beginning!r}, with "
            "which the model has to begin its answers by itself")


def plain_texts(parts: list[tuple[str, TokenizedRows]]) -> Iterator[str]:
    """Yield a warning about data sets of text prompts, if the tokenizer has a template for chats."""
    names = [name for name, rows in parts if rows.config.chat is None and _has_plain_text(rows)]
    if names:
        yield (
            f"{' and '.join(dict.fromkeys(names))}: prompts are text, and the tokenizer has a chat template, "
            "which is not applied to them: chat=True makes chats of them, chat=False leaves them")


def _has_plain_text(rows: TokenizedRows) -> bool:
    """Return whether a prompt becomes no chat. Texts that a template has written have special tokens."""
    template = rows.tokenizer.chat_template
    if rows.config.makes_chats or template is None:
        return False
    prompts = [row["prompt"] for row in rows.rows if isinstance(row["prompt"], str)]
    specials = [text for text in special_texts(rows.tokenizer) if text in str(template)]
    return any(not any(text in prompt for text in specials) for prompt in prompts)


def other_ends(
    program: Program, graph: DataflowGraph, name: str, rows: TokenizedRows
) -> Iterator[str]:
    """Yield a warning about texts in the form of the chat template that end in another way than its turns."""
    end = end_of_turn(program.experiment.tokenizer_dir())
    eos = rows.tokenizer.eos_token_id
    trained = program.roles.keys() & graph.roles("train_step")
    trains = any(program.roles[role].head == "lm" for role in trained)
    if not trains or "response_mask" not in rows.keys or rows.counts.chats or end is None or end[0] == eos:
        return
    others = [
        i for i, samples in enumerate(rows.samples)
        if end[1] in str(samples[0]["prompt"]) and any(
            end[0] not in sample["sequence_ids"][len(sample["prompt_ids"]):] for sample in samples)]
    if others:
        shown = rows.tokenizer.decode([eos])
        yield (
            f"{name}: in {len(others)} rows, first in {rows.place_of(others[0])}, the prompt is written in "
            f"the chat template's form, and the completion learns to end with {shown} instead of {end[1]}, "
            f"with which the template ends turns: end it with {end[1]}, or give rows of messages")
