"""Calls of tools in what models say: their forms, what is wrong with them, and what functions answer."""

import asyncio
import inspect
import json
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import SimpleNamespace
from typing import Literal

import pytest

from realhf.environments.protocol import Turn
from realhf.environments.tool_calls import (
    AnswerParser,
    ToolEnvironment,
    call_tools,
    python_tool,
    schema_of,
    value_fault,
)
from realhf.environments.turn_tokens import TurnTokens
from realhf.errors import UserError
from realhf.rewards.sandbox import Sandbox
from tests.environments.test_turn_tokens import says, tokenizer, user


def add(a: int, b: int = 0) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def later(text: str) -> dict:
    """Wait, and return the text.

    Args:
        text: Any text.
    """
    await asyncio.sleep(0.01)
    return {"text": text}


SCHEMAS = [schema_of(add), schema_of(later)]
FORMS = {
    "qwen2_5": '{said}<tool_call>\n{first}\n</tool_call>\n<tool_call>\n{second}\n</tool_call>',
    "hermes": '{said}\n<tool_call>{first}</tool_call><tool_call>{second}</tool_call>',
    "mistral": '{said}[TOOL_CALLS] [{first}, {second}]',
    "llama3_1": '{first}; {second}'}


def parsed(text, name="qwen2_5", **more):
    return AnswerParser(tokenizer(name), SCHEMAS)(text, **more)


@pytest.mark.parametrize("name", FORMS)
def test_parallel_calls_in_the_forms_of_models(name):
    key = "parameters" if name == "llama3_1" else "arguments"
    first, second = (
        json.dumps({"name": n, key: a}) for n, a in (("add", {"a": 2, "b": 3}), ("later", {"text": "x"})))
    found = parsed(FORMS[name].format(said="So: ", first=first, second=second), name, first_call=7)
    assert found.is_sound and found.faults == ("", "")
    assert [(c["id"], c["function"]) for c in found.message["tool_calls"]] == [
        ("call00007", {"name": "add", "arguments": {"a": 2, "b": 3}}),
        ("call00008", {"name": "later", "arguments": {"text": "x"}})]
    assert found.message["content"] == ("" if name == "llama3_1" else "So:")
    plain = parsed("It is 5. {not a call}", name)
    assert plain.message == {"role": "assistant", "content": "It is 5. {not a call}"} and plain.is_sound


def mixed(
    n: int, x: float, s: str, flag: bool, many: list[int], of: Literal["a", "b"], maybe: int | None = None
) -> str:
    """Take values of all types.

    Args:
        n: A whole number.
        x: A number.
        s: A text.
        flag: Yes or no.
        many: Numbers.
        of: One of two.
        maybe: A number or nothing.
    """
    return s


@pytest.mark.parametrize("name", FORMS)
def test_a_made_up_call_is_said_as_the_template_writes_it(name):
    """Its arguments are of the function's types, and the text is read as this call."""
    parser = AnswerParser(tokenizer(name), [schema_of(mixed)])
    turns = TurnTokens(tokenizer(name), tools=[schema_of(mixed)])
    (call,) = parser.made_up_calls()
    found = parser(turns.call_text(call))
    assert found.is_sound, found.faults
    assert [c["function"] for c in found.message["tool_calls"]] == [call["function"]]
    types = {"n": int, "x": float, "s": str, "flag": bool, "many": list, "of": str}
    made = call["function"]["arguments"]
    assert {key: type(value) for key, value in made.items()} == types
    assert made["of"] in ("a", "b") and [type(value) for value in made["many"]] == [int]


def test_thinking_is_apart_and_calls_in_it_are_none():
    found = parsed('<think>I could <tool_call>\n</think>\n\nIt is 5.')
    assert found.message == {
        "role": "assistant", "content": "It is 5.", "reasoning_content": "I could <tool_call>"}


@pytest.mark.parametrize(("text", "sentence"), [
    ('<tool_call>{"name": "add", "arguments": {"a": 1</tool_call>', "the tool call cannot be read: "),
    ('<tool_call>{"name": "add"', "must stand in pairs"),
    ('<tool_call>[1]</tool_call>', r"\[1\] must be an object with a name and arguments"),
    ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "the arguments of add are"),
])
def test_a_malformed_call_is_told_to_the_model(text, sentence):
    found = parsed(text)
    (reply,) = found.replies()
    assert not found.is_sound and found.message["content"] == text and "tool_calls" not in found.message
    assert reply["role"] == "user" and reply["content"].startswith("Error: the tool call cannot be read")
    with pytest.raises(AssertionError, match=sentence):
        raise AssertionError(reply["content"])


@pytest.mark.parametrize(("call", "sentence"), [
    ({"name": "ad", "arguments": {}}, "there is no tool 'ad': legal are add, later"),
    ({"name": "add", "arguments": {"b": 1}}, "add: arguments lacks 'a': it must have a"),
    ({"name": "add", "arguments": {"a": "1"}}, "add: a is '1': it must be of type integer"),
    ({"name": "add", "arguments": {"a": True}}, "add: a is True: it must be of type integer"),
    ({"name": "add", "arguments": {"a": 1, "c": 1}},
     "add: arguments has 'c', which is not known: legal are a, b"),
])
def test_wrong_calls_are_answered_each_by_its_own_message(call, sentence):
    good = json.dumps({"name": "add", "arguments": {"a": 1.0}})
    found = parsed(f"<tool_call>{good}</tool_call><tool_call>{json.dumps(call)}</tool_call>")
    assert found.faults == ("", sentence)
    assert [(m["role"], m["tool_call_id"], m["content"]) for m in found.replies()] == [
        ("tool", "call00000", "Not called, because another call is wrong."),
        ("tool", "call00001", f"Error: {sentence}")]


def test_values_and_schemas():
    schema = {"type": "object", "required": ["kind"], "properties": {
        "kind": {"enum": ["x", "y"]}, "sizes": {"type": "array", "items": {"type": "number"}},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}
    good = {"kind": "x", "sizes": [1, 2.5], "maybe": None}
    assert value_fault(good, schema, "v") == ""
    for change in ({"kind": "z"}, {"sizes": [1, "2"]}, {"sizes": 3}, {"maybe": 3}, {"other": 1}):
        assert value_fault(good | change, schema, "v")


RESPONSES = {
    "defaults": {"role": "assistant"}, "start_anchor": "<|im_start|>assistant\n", "fields": {
        "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"},
        "tool_calls": {
            "open_pattern": r"<function=(?P<name>\w+)>", "close_pattern": r"</function>\s*", "repeats": True,
            "content": "json", "transform": {
                "type": "function", "function": {"name": "{name}", "arguments": "{content}"}}},
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"}}}


def test_response_templates_of_tokenizers_parse_what_others_cannot():
    """As transformers parses it."""
    from transformers.utils.chat_parsing import parse_response

    with pytest.raises(UserError, match="give its tokenizer a response_template"):
        AnswerParser(tokenizer("qwen3_5_think"), SCHEMAS)
    parser = AnswerParser(SimpleNamespace(response_template=RESPONSES), SCHEMAS)
    text = 'Two.\n</think>\n\nHm.<function=add>{"a": 2}</function>'
    prefix = "<|im_start|>assistant\n<think>\n"
    theirs = parse_response(text, RESPONSES, prefix=prefix, tools=SCHEMAS)
    found = parser(text, prefix=prefix)
    assert found.is_sound and found.message["reasoning_content"].strip() == "Two."
    assert found.message["content"] == theirs["content"]
    (call,) = found.message["tool_calls"]
    assert call["function"] == theirs["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2}}
    assert parser(text.replace("2", "2,"), prefix=prefix).faults[0].startswith("the tool call cannot be read")
    assert parser(text.replace("add", "sub"), prefix=prefix).faults == (
        "there is no tool 'sub': legal are add, later",)


def calls(*pairs):
    return says("", tool_calls=[
        {"id": f"call0000{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(pairs)])


def test_functions_answer_calls_in_order_and_errors_are_told():
    functions = {"add": add, "later": later}
    turn = call_tools(calls(("add", {"a": 2}), ("add", {"x": 1}), ("sub", {})), functions)
    assert isinstance(turn, Turn) and [m["content"] for m in turn.messages] == [
        "2", "Error: TypeError: add() got an unexpected keyword argument 'x'",
        "Error: ValueError: there is no tool 'sub': legal are add, later"]
    waits = call_tools(calls(("later", {"text": "x"}), ("add", {"a": 1})), functions)
    assert inspect.isawaitable(waits)

    async def awaited():
        return await waits

    assert [m["content"] for m in asyncio.run(awaited()).messages] == ['{"text": "x"}', "1"]
    environment = ToolEnvironment([add])
    assert environment.start({}, 0).tools == [add]
    assert environment.step(says("5")).done and not environment.step(calls(("add", {"a": 1}))).done


def test_a_function_needs_types_and_descriptions():
    def bare(a):
        return a

    with pytest.raises(UserError, match="tool bare: .*its arguments need types, and a docstring"):
        schema_of(bare)
    function = SCHEMAS[0]["function"]
    assert function["parameters"]["properties"]["a"] == {"type": "integer", "description": "The first."}
    assert schema_of(SCHEMAS[0]) is SCHEMAS[0]


def test_python_runs_in_the_sandbox_and_its_errors_are_read():
    python = python_tool(Sandbox(allow_unprotected=True))
    assert python("print(2 ** 10)") == "1024"
    assert "ZeroDivisionError" in python("print(1)\n1 / 0") and python("1") == "(the program prints nothing)"
    assert len(python("print('x' * 100000)")) < 4200
    assert schema_of(python)["function"]["parameters"]["required"] == ["code"]
    assert user("x")["role"] == "user"


def test_programs_of_the_python_tool_wait_for_one_another():
    """A worker has a thread for each environment, and hundreds of programs at once would stop the machine."""
    python = python_tool(Sandbox(allow_unprotected=True), concurrency=1)
    code = "import time\nprint(time.time())\ntime.sleep(0.1)\nprint(time.time())"
    with ThreadPoolExecutor(3) as pool:
        times = [sorted(map(float, text.split())) for text in pool.map(python, [code] * 3)]
    times.sort()
    assert all(before[1] <= after[0] for before, after in pairwise(times))
    with pytest.raises(ValueError, match="python_tool.concurrency"):
        python_tool(concurrency=0)
