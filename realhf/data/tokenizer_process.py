"""Tokenizers and chat templates of strangers, first tried in a process with limits. Imports no torch.

A chat template is a program, and a malformed tokenizer.json can end the process that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

from realhf.errors import UserError
from realhf.job_process import CannotStart, JobEnded, JobProcess, serve
from realhf.user_input.files import (
    MAX_ROW_BYTES,
    MAX_TABLE_BYTES,
    open_regular,
    read_text,
    refuse_lfs_pointer,
)
from realhf.user_input.units import format_bytes

_CHAT_SECONDS = 5.0
"""Most processor time of a chat. Templates take milliseconds."""
_LOAD_SECONDS = 60.0
"""Most processor time to load a tokenizer. Those of 250,000 tokens take about a second."""
_CHAT_BYTES = 1 << 30
_LOAD_BYTES = 4 << 30
"""Most memory of the processes."""
_TRIED = "Hello, 12 worlds!\n"


def read_tokenizer(path: Path) -> Any:
    """Return the tokenizer of the library `tokenizers` in a tokenizer.json, without padding and truncation.

    A process of its own reads it first. Raises UserError if that fails.
    """
    from tokenizers import Tokenizer  # Imported here, as only checks need it.

    try_tokenizer(path)
    try:
        tokenizer = Tokenizer.from_str(read_text(path, most=MAX_TABLE_BYTES))
    except Exception as error:  # The library has no more specific class.
        raise UserError(f"{path} cannot be read: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def try_tokenizer(path: Path) -> None:
    """Raise UserError if a process that reads a tokenizer.json and tokenises a text fails."""
    try:
        status = path.stat()
        beginning = b""
        if path.is_file():
            with open_regular(path) as file:
                beginning = file.read(64)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    refuse_lfs_pointer(beginning, str(path))
    if sentence := _failure(path, status.st_size, status.st_mtime_ns):
        raise UserError(f"{path} cannot be read: {sentence}")


@lru_cache(maxsize=64)
def _failure(path: Path, size: int, modified: int) -> str:
    """Return why a process cannot read a tokenizer.json, or an empty string."""
    text = read_text(path, most=MAX_TABLE_BYTES)
    process = JobProcess(
        __name__, main="try_tokenizers", seconds=_LOAD_SECONDS, memory_bytes=_LOAD_BYTES)
    try:
        return str(process.answer(text))
    except JobEnded as error:
        return f"a process that tried it has failed ({error})"
    except CannotStart as error:  # Raised, so not cached: the file is not at fault.
        raise UserError(f"{path} cannot be tried: {error}") from error
    finally:
        process.close()


def render_chat(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None,
    finds_answers: bool = False, **arguments: Any,
) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a chat as the tokenizer's template writes it; `arguments` are further ones.

    With `finds_answers`, also return the ranges of characters that the template writes between
    {% generation %} and {% endgeneration %}. `tokenizer` is a LightTokenizer or one of transformers.

    A process of its own does the work. Raises ValueError if that takes too much time or memory, or if the
    template refuses the chat.
    """
    template = tokenizer.get_chat_template(tools=tools)
    if template is None:
        raise ValueError("the tokenizer has no chat template")
    how = {
        **tokenizer.special_tokens_map, **arguments, "tools": tools, "chat_template": template,
        "return_assistant_tokens_mask": finds_answers}
    try:
        answer = _renderer().answer({"messages": messages, "how": how})
    except JobEnded as error:
        raise ValueError(f"the chat template does not end: {error}") from error
    except CannotStart as error:
        raise ValueError(f"the chat template cannot be tried: {error}") from error
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer["text"], [(start, stop) for start, stop in answer["answers"]]


@cache
def _renderer() -> JobProcess:
    return JobProcess(
        __name__, main="render_chats", seconds=_CHAT_SECONDS, memory_bytes=_CHAT_BYTES)


def try_tokenizers() -> None:
    """Try tokenizers until standard input ends."""
    from tokenizers import Tokenizer

    serve(partial(_fault, Tokenizer))


def _fault(tokenizer_class: Any, text: str) -> str:
    """Return an error in words, or an empty string."""
    try:
        tokenizer = tokenizer_class.from_str(text)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.decode(tokenizer.encode(_TRIED).ids)
    except BaseException as error:  # A panic of Rust is no Exception.
        return f"{type(error).__name__}: {str(error)[:1000]}"
    return ""


def render_chats() -> None:
    """Render chats until standard input ends."""
    from transformers.utils.chat_template_utils import render_jinja_template

    serve(partial(_rendered, render_jinja_template))


def _rendered(render: Callable[..., Any], job: dict[str, Any]) -> dict[str, Any]:
    """Return the text of a chat and the ranges of answers in it, or an error in words."""
    # Templates do not see fields that are None, as in the tokenizers of transformers.
    messages = [{k: v for k, v in message.items() if v is not None} for message in job["messages"]]
    try:
        (text,), ranges = render([messages], **job["how"])
    except MemoryError:
        return {"error": f"the chat template needs more than {format_bytes(_CHAT_BYTES)} of memory"}
    except Exception as error:  # A template may raise any exception.
        return {"error": f"{type(error).__name__}: {str(error)[:1000]}"}
    if len(text) > MAX_ROW_BYTES:
        return {"error": f"the chat template writes more than {format_bytes(MAX_ROW_BYTES)}"}
    return {"text": text, "answers": ranges[0] if ranges else []}
