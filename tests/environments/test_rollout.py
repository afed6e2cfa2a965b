"""A rollout from start to end with a stub for the model: workers, tokens of turns and tool calls together."""

from realhf.environments.protocol import rollout_seed
from realhf.environments.tool_calls import AnswerParser
from realhf.environments.turn_tokens import TurnTokens
from realhf.environments.workers import EnvironmentSource, EnvironmentWorkers
from tests.environments import players
from tests.environments.test_turn_tokens import tokenizer
from tests.environments.test_workers import reply

SAYS = (
    'I add.\n<tool_call>\n{"name": "tool_add", "arguments": {"a": 2, "b": 3}}\n</tool_call>\n<tool_call>\n'
    '{"name": "tool_add", "arguments": {"a": 4, "b": 5}}\n</tool_call>',
    '<tool_call>\n{"name": "tool_sub", "arguments": {"a": 2}}\n</tool_call>',
    "They are 5 and 9.")


def test_a_row_is_what_the_template_writes_for_all_that_was_said():
    """The model samples its texts, each with the token that ends it, and all else comes from the template."""
    light = tokenizer("qwen2_5")
    end = light.backend.token_to_id("<|im_end|>")
    workers = EnvironmentWorkers(players.TOOLS, EnvironmentSource("TOOLS", module=players.__name__))
    workers.start(0, {"prompt": "Add."}, rollout_seed(1, step=0, prompt=0, sample=0))
    start = reply(workers).start
    turns = TurnTokens(light, tools=start.tools)
    parse = AnswerParser(light, start.tools)
    row = turns.start(start.messages)
    sampled = [0] * len(row)
    said = list(start.messages)
    rewards = []
    num_calls = 0
    for text in SAYS:
        tokens = [*light.encode(text, add_special_tokens=False), end]
        row += tokens
        sampled += [1] * len(tokens)
        prefix = turns.text(row[: -len(tokens)])
        answer = parse(turns.answer_text(tokens), prefix=prefix, first_call=num_calls)
        num_calls += len(answer.message.get("tool_calls", ()))
        said.append(answer.message)
        if not answer.is_sound:
            rewards.append(0.0)
            new = answer.replies()
        else:
            workers.step(0, answer.message)
            turn = reply(workers).turn
            rewards.append(turn.total)
            if turn.done:
                break
            new = turn.messages
        said += new
        observation = turns.observation(new, answer=answer.message, last_token=row[-1])
        row += observation
        sampled += [0] * len(observation)
    workers.shutdown()
    assert [m["content"] for m in said if m["role"] == "tool"] == [
        "5", "9", "Error: there is no tool 'tool_sub': legal are tool_add"]
    assert turns.text(row) + "\n" == turns.render(said, asks=False)
    assert row == turns.encode(turns.text(row)) and len(rewards) == 3
    drawn = [token for token, is_drawn in zip(row, sampled, strict=True) if is_drawn]
    assert drawn == [token for text in SAYS for token in [*light.encode(text, add_special_tokens=False), end]]
