"""Tools: their schemas, the calls in what a model says, and environments that are nothing but tools.

`AnswerParser` turns the text of a turn into a message with tool calls, and finds calls that are wrong.
`ToolEnvironment` answers calls by functions; `python_tool` makes one that runs code in a sandbox. Imports no
torch.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from threading import BoundedSemaphore
from typing import Any

from realhf.environments.protocol import ChatMessage, Start, Turn
from realhf.errors import UserError, shown
from realhf.job_process import CannotStart, JobEnded, JobProcess, serve
from realhf.rewards.sandbox import Sandbox
from realhf.user_input.field_types import require

Schema = dict[str, Any]
"""A tool as {"type": "function", "function": {"name", "description", "parameters"}}."""
_PARSE_SECONDS = 5.0
"""Most processor time for the text of a turn. Its form has regular expressions of a stranger's tokenizer."""
_PARSE_BYTES = 1 << 30
_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_MISTRAL = "[TOOL_CALLS]"
_PYTHON_TAG = "<|python_tag|>"
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,),
    "object": (dict,), "null": (type(None),)}
_MAX_OUTPUT = 4096
"""Most characters of a program's output that the Python tool returns, from the beginning and from the end."""


def schema_of(tool: Any) -> Schema:
    """Return the schema of a tool: of a function by its signature and its docstring in Google's style.

    Raises UserError if an argument has no type or no description.
    """
    if isinstance(tool, dict):
        return tool
    try:
        schema = schema_library().get_json_schema(tool)
    except Exception as error:  # The library has several classes of its own.
        name = getattr(tool, "__name__", shown(tool))
        raise UserError(
            f"tool {name}: {' '.join(str(error).split())}; its arguments need types, and a docstring that "
            "describes it and, under `Args:`, each argument") from error
    function = {key: value for key, value in schema["function"].items() if key != "return"}
    return {"type": "function", "function": function}


def schema_library() -> Any:
    """Import the module of transformers that makes schemas, without torch. It takes seconds."""
    from transformers.utils import chat_template_utils

    if "torch" not in sys.modules:  # Then there is no tensor, for which alone it would import torch.
        chat_template_utils.is_torch_available = _no
    return chat_template_utils


def _no() -> bool:
    return False


@dataclass(frozen=True)
class ParsedAnswer:
    """A turn of the model as a message, and what is wrong with its calls."""

    message: ChatMessage
    faults: tuple[str, ...] = ()
    """For each call a sentence if it is wrong, else an empty one; or one sentence if no call can be read."""

    @property
    def is_sound(self) -> bool:
        return not any(self.faults)

    def replies(self) -> list[ChatMessage]:
        """Return the messages that tell the model what is wrong with its calls."""
        calls = self.message.get("tool_calls") or []
        if not calls:
            return [{"role": "user", "content": f"Error: {fault}"} for fault in self.faults]
        return [
            _result(call, f"Error: {fault}" if fault else "Not called, because another call is wrong.")
            for call, fault in zip(calls, self.faults, strict=True)]


def _result(call: Mapping[str, Any], text: str) -> ChatMessage:
    return {"role": "tool", "name": call["function"]["name"], "tool_call_id": call["id"], "content": text}


class AnswerParser:
    """Parses the turns of a model that may call tools.

    The tokenizer says how its model writes calls: by a response template (transformers), or else its chat
    template shows one of these forms: JSON in <tool_call> (Hermes, Qwen), behind [TOOL_CALLS] (Mistral), or
    as the whole answer (Llama).
    """

    def __init__(self, tokenizer: Any, tools: Sequence[Schema]) -> None:
        self._tools = {tool["function"]["name"]: tool for tool in tools}
        """Name -> the schema of the tool."""
        self._response_template = getattr(tokenizer, "response_template", None)
        self._find: Callable[[str], tuple[str, list[Any]]] = _no_calls
        if not tools or self._response_template is not None:
            return
        template = tokenizer.get_chat_template(tools=list(tools)) or ""
        if "<function=" not in template and "<arg_key>" not in template:
            forms = {"<tool_call>": _hermes_calls, _MISTRAL: _mistral_calls, "parameters": _llama_calls}
            self._find = next((find for sign, find in forms.items() if sign in template), _no_calls)
        if self._find is _no_calls:
            raise UserError(
                "how the model writes tool calls is not known: give its tokenizer a response_template (see "
                "transformers' documentation), or use a model whose chat template has <tool_call>, "
                "[TOOL_CALLS] or Llama's parameters")

    def __call__(self, text: str, *, prefix: str = "", first_call: int = 0) -> ParsedAnswer:
        """Parse the text of a turn, whose special tokens are in it but for the one that ends it.

        `prefix` is the text before it, from the last observation on. `first_call` is the number of calls that
        the rollout has had: their ids follow from it.
        """
        try:
            message = self._by_template(text, prefix) if self._response_template else self._by_form(text)
        except ValueError as error:
            return ParsedAnswer(
                {"role": "assistant", "content": text}, (f"the tool call cannot be read: {error}",))
        faults = []
        for i, call in enumerate(message.get("tool_calls", ())):
            call["id"] = f"call{(first_call + i) % 100000:05d}"  # Mistral's templates want nine characters.
            faults.append(self._fault(call["function"]))
        return ParsedAnswer(message, tuple(faults))

    def made_up_calls(self) -> list[dict[str, Any]]:
        """Return a call of each tool, with arguments of the types in its schema."""
        calls = []
        for name, tool in self._tools.items():
            arguments = _made_up({"type": "object", **(tool["function"].get("parameters") or {})})
            calls.append({"type": "function", "function": {"name": name, "arguments": arguments}})
        for number, call in enumerate(calls):
            call["id"] = f"call{number:05d}"
        return calls

    def _by_form(self, text: str) -> ChatMessage:
        thought, found, said = text.rpartition("</think>")
        content, calls = self._find(said)
        content = content.strip() if found or calls else content
        message: ChatMessage = {"role": "assistant", "content": content}
        if found:
            message["reasoning_content"] = thought.replace("<think>", "", 1).strip()
        if calls:
            message["tool_calls"] = [{"type": "function", "function": _function(call)} for call in calls]
        return message

    def _by_template(self, text: str, prefix: str) -> ChatMessage:
        job = {"text": text, "prefix": prefix, "template": self._response_template,
               "tools": list(self._tools.values())}
        try:
            answer = _response_parser().answer(job)
        except (JobEnded, CannotStart) as error:
            raise ValueError(f"the tokenizer's response_template does not end: {error}") from error
        if "error" in answer:
            raise ValueError(answer["error"])
        message = {"role": "assistant", "content": "", **answer["message"]}
        if not isinstance(message["content"], str):
            message["content"] = ""
        calls = message.pop("tool_calls", None) or []
        if calls:
            functions = [call.get("function", call) if isinstance(call, dict) else call for call in calls]
            message["tool_calls"] = [{"type": "function", "function": _function(call)} for call in functions]
        return message

    def _fault(self, function: Mapping[str, Any]) -> str:
        """Return a sentence if a call names no tool or has other arguments than its schema says."""
        name = function["name"]
        if name not in self._tools:
            return f"there is no tool {name!r}: legal are {', '.join(self._tools)}"
        schema = self._tools[name]["function"].get("parameters") or {}
        fault = value_fault(function["arguments"], {"type": "object", **schema}, "arguments")
        return f"{name}: {fault}" if fault else ""


def value_fault(value: Any, schema: Mapping[str, Any], where: str) -> str:
    """Return a sentence if a value is not what a JSON schema says, as far as schemas of functions go."""
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        faults = [value_fault(value, option, where) for option in options]
        return faults[0] if all(faults) else ""
    if "enum" in schema:
        return "" if value in schema["enum"] else f"{where} is {shown(value)}: legal are {schema['enum']}"
    kinds = schema.get("type") or []
    kinds = [kinds] if isinstance(kinds, str) else kinds
    known = [kind for kind in kinds if kind in _TYPES]
    if known and not any(_is_of(value, kind) for kind in known):
        return f"{where} is {shown(value)}: it must be of type {' or '.join(known)}"
    if isinstance(value, dict) and "properties" in schema:
        parts = schema["properties"]
        for name in schema.get("required", ()):
            if name not in value:
                return f"{where} lacks {name!r}: it must have {', '.join(schema['required'])}"
        for name, part in value.items():
            if name not in parts and schema.get("additionalProperties") is not True:
                return f"{where} has {name!r}, which is not known: legal are {', '.join(parts) or 'none'}"
            if name in parts and (fault := value_fault(part, parts[name], name)):
                return fault
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        faults = [value_fault(part, schema["items"], f"{where}[{i}]") for i, part in enumerate(value)]
        return next((fault for fault in faults if fault), "")
    return ""


def _made_up(schema: Mapping[str, Any]) -> Any:
    """Return a value as a JSON schema says, as far as schemas of functions go."""
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return _made_up(options[0])
    if "enum" in schema:
        return schema["enum"][0]
    kinds = schema.get("type") or "string"
    kind = kinds if isinstance(kinds, str) else kinds[0]
    if kind == "object":
        parts = schema.get("properties") or {}
        return {name: _made_up(parts[name]) for name in schema.get("required", ()) if name in parts}
    if kind == "array":
        return [_made_up(schema["items"])] if isinstance(schema.get("items"), dict) else []
    return {"integer": 1, "number": 1.0, "boolean": True, "null": None}.get(kind, "1")


def _is_of(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[kind])


def _function(call: Any) -> dict[str, Any]:
    """Return name and arguments of a call. Raises ValueError if it lacks one of them."""
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError(f"{shown(call)} must be an object with a name and arguments")
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {call['name']} are {shown(arguments)}: they must be an object")
    return {"name": call["name"], "arguments": arguments}


def _no_calls(text: str) -> tuple[str, list[Any]]:
    return text, []


def _hermes_calls(text: str) -> tuple[str, list[Any]]:
    calls = [json.loads(found) for found in _HERMES.findall(text)]
    rest = _HERMES.sub("", text)
    if "<tool_call>" in rest or "</tool_call>" in rest:
        raise ValueError("<tool_call> and </tool_call> must stand in pairs")
    return rest, calls


def _mistral_calls(text: str) -> tuple[str, list[Any]]:
    content, found, calls = text.partition(_MISTRAL)
    if not found:
        return text, []
    parsed = json.loads(calls)
    return content, parsed if isinstance(parsed, list) else [parsed]


def _llama_calls(text: str) -> tuple[str, list[Any]]:
    """Return the calls of an answer that is nothing but JSON objects with a name, separated by semicolons."""
    body = text.strip()
    is_marked = body.startswith(_PYTHON_TAG)
    body = body.removeprefix(_PYTHON_TAG).strip()
    if not is_marked and not re.match(r'\{\s*"(?:name|type|function)"', body):
        return text, []
    decoder = json.JSONDecoder()
    calls = []
    while body:
        call, end = decoder.raw_decode(body)
        calls.append(call.get("function", call) if isinstance(call.get("function"), dict) else call)
        body = body[end:].lstrip(" \n;")
    return "", calls


@cache
def _response_parser() -> JobProcess:
    return JobProcess(__name__, main="parse_responses", seconds=_PARSE_SECONDS, memory_bytes=_PARSE_BYTES)


def parse_responses() -> None:
    """Parse texts by response templates until standard input ends."""
    schema_library()
    from transformers.utils.chat_parsing import parse_response

    serve(partial(_parsed, parse_response))


def _parsed(parse: Callable[..., Any], job: Mapping[str, Any]) -> dict[str, Any]:
    try:
        message = parse(job["text"], job["template"], prefix=job["prefix"], tools=job["tools"] or None)
    except Exception as error:  # A template may raise any exception.
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    if not isinstance(message, dict):
        return {"error": "the response template finds no message"}
    return {"message": json.loads(json.dumps(message, default=str))}


@dataclass
class ToolEnvironment:
    """An environment of functions. It answers the model's calls, and is done with a message without one."""

    tools: Sequence[Callable[..., Any]]
    schemas: Sequence[Schema] = field(default_factory=list)

    def start(self, row: Mapping[str, Any], seed: int) -> Start:
        """Return the prompt of the row, and the tools."""
        return Start(tools=list(self.schemas or self.tools))

    def step(self, message: ChatMessage) -> Turn | Awaitable[Turn]:
        """Return the results of the calls."""
        return call_tools(message, {getattr(tool, "__name__", ""): tool for tool in self.tools})


def call_tools(message: ChatMessage, functions: Mapping[str, Callable[..., Any]]) -> Turn | Awaitable[Turn]:
    """Return a turn with what functions return to the calls of a message, or with the errors that they raise.

    It is done if there are no calls. If a function is `async`, await the turn: such calls run together.
    """
    calls = message.get("tool_calls") or []
    results = [_called(call, functions) for call in calls]

    async def awaited() -> Turn:
        answers = await asyncio.gather(*(_awaited(result) for result in results))
        return Turn([_answer(call, answer) for call, answer in zip(calls, answers, strict=True)])

    if any(inspect.isawaitable(result) for result in results):
        return awaited()
    answers = [_answer(call, result) for call, result in zip(calls, results, strict=True)]
    return Turn(answers, done=not calls)


def _called(call: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]]) -> Any:
    """Return what a function returns to a call, or the exception that it raises."""
    name = call["function"]["name"]
    try:
        if name not in functions:
            raise ValueError(f"there is no tool {name!r}: legal are {', '.join(functions)}")
        return functions[name](**call["function"]["arguments"])
    except Exception as error:  # The model reads it.
        return error


async def _awaited(result: Any) -> Any:
    try:
        return await result if inspect.isawaitable(result) else result
    except Exception as error:
        return error


def _answer(call: Mapping[str, Any], result: Any) -> ChatMessage:
    if isinstance(result, Exception):
        return _result(call, f"Error: {type(result).__name__}: {result}")
    return _result(call, result if isinstance(result, str) else json.dumps(result, default=str))


def python_tool(sandbox: Sandbox | None = None, *, concurrency: int = 8) -> Callable[[str], str]:
    """Return a tool that runs a Python program in a sandbox, each time anew.

    At most `concurrency` of them run at once in a worker; the others wait.
    """
    require(concurrency >= 1, "python_tool.concurrency", concurrency, "be at least 1")
    runs_in = sandbox or Sandbox()
    free = BoundedSemaphore(concurrency)

    def python(code: str) -> str:
        """Run a Python program and return what it prints.

        Args:
            code: The whole program. Nothing of earlier programs is left.
        """
        with free:
            execution = runs_in.run(code, as_program=True)
        text = execution.stdout
        if execution.reason != "passed":
            text += f"\n{execution.reason}: {execution.detail or execution.stderr[-300:]}"
        if len(text) > _MAX_OUTPUT:
            text = f"{text[: _MAX_OUTPUT // 2]}\n...\n{text[-_MAX_OUTPUT // 2 :]}"
        return text.strip() or "(the program prints nothing)"

    return python
