"""`realhf init`: writes an experiment that runs, its data and a test of its reward or environment. Imports no
torch."""

import json
import keyword
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import ascii_letters, digits
from typing import Any, NamedTuple

from realhf.cli.overrides import refuse_words
from realhf.data.conversations import find_conversation
from realhf.data.dataset import DatasetConfig
from realhf.data.rows import DatasetRows, read_rows
from realhf.errors import UserError, warn
from realhf.rewards.reward import EXTRAS, STANDARD
from realhf.user_input.shipped import shipped_dir
from realhf.user_input.suggest import did_you_mean

HELP = "write a directory with an experiment that runs, its data and a test of its reward or environment"
EXAMPLES = (
    "realhf init first",
    "realhf init game --template environment",
    "realhf init mine --data rows.jsonl --prompt-key question --answer-key solution",
    "realhf init mine --template sft --model models/Qwen2.5-0.5B --data rows.jsonl")
_COMMON = "common"
"""The template whose files all others share but one."""
_ENVIRONMENT = "environment"
"""The template that has files of its own alone: an environment in the place of a reward."""
_MODEL_FILES = "model/"
_TINY_ANSWER = "else 4)"
"""The part of experiment.py with the number of tokens that the tiny model may write."""
_DATA_FILES = ("train.jsonl", "held_out.jsonl")
_PROMPT_KEY = "prompt"
_ANSWER_KEY = "answer"
_FEWEST_TO_HOLD_OUT = 20
_MOST_HELD_OUT = 200
_TAKEN = (*STANDARD, *EXTRAS, "columns", "zip", "str")
"""Names in the reward function that no column can have."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments of `realhf init`."""
    add = parser.add_argument
    add("directory", metavar="DIR", help="directory to write, which may exist")
    add("--template", default="grpo", metavar="NAME", help="grpo (default), sft, dpo or environment")
    add("--model", help="model to train; default: a tiny one with random weights, for these rows")
    columns = "prompt and answer (sft: completion; dpo: chosen, rejected)"
    rows = f"rows to train on, for a tiny model with the columns {columns}, or those that an environment "
    rows += "reads; default: a small set of exercises"
    add("--data", metavar="ROWS", help=rows)
    add("--prompt-key", metavar="COLUMN", help=f"column of the prompts in --data; default: {_PROMPT_KEY}")
    of_answers = "column of --data with the answers, which the reward function reads"
    add("--answer-key", metavar="COLUMN", help=f"{of_answers}; default: {_ANSWER_KEY}")


def main(options: Namespace, words: list[str]) -> int:
    """Write the directory and return the exit code."""
    refuse_words(options.parser, words)
    directory = Path(options.directory)
    files = _files(options)
    _check_directory(directory, list(files))
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(content, encoding="utf-8")
    (test,) = (name for name in files if name.startswith("test_"))
    has_answers = options.model is None and options.template == "grpo"  # The tiny model's rows were read.
    if options.data is not None and not has_answers:
        what = f"the reward in {directory / 'reward.py'} reads a column `{options.answer_key or _ANSWER_KEY}`"
        if options.template == _ENVIRONMENT:
            what = f"`start` in {directory / 'environment.py'} reads a column `game`"
        warn(f"{what}: change it to suit your rows")
    steps = (f"pytest {test}", "realhf check experiment.py", "realhf run experiment.py --nproc 2")
    kind = f"a {options.template} experiment"
    if options.template == _ENVIRONMENT:
        kind = "an experiment with an environment"
    print(f"{directory} has {kind} of {len(files)} files. Try in it:")
    print("\n".join(f"  {step}" for step in steps))
    return 0


def template_names() -> list[str]:
    """Return the names of the shipped templates."""
    names = (path.name for path in shipped_dir("templates").iterdir() if path.is_dir())
    return sorted(name for name in names if name != _COMMON)


def _files(options: Namespace) -> dict[str, str]:
    """Return the contents of the files to write, by name."""
    names = template_names()
    if options.template not in names:
        meant = did_you_mean(options.template, names)
        raise UserError(f"--template {options.template} does not exist{meant}: legal are {', '.join(names)}")
    _check_columns(options)
    prompt_key = options.prompt_key or _PROMPT_KEY
    answer_key = options.answer_key or _ANSWER_KEY
    parts = [_COMMON, options.template] if options.template != _ENVIRONMENT else [_ENVIRONMENT]
    roots = [shipped_dir("templates") / name for name in parts]
    files = {
        str(path.relative_to(root)): path.read_text(encoding="utf-8")
        for root in roots for path in sorted(root.rglob("*"))
        if path.is_file() and path.suffix in (".py", ".ini", ".md", ".json", ".jsonl")}
    changes: dict[str, str] = {}
    if options.model is not None:
        changes["MODEL"] = _quoted(options.model)
        files = {name: text for name, text in files.items() if not name.startswith(_MODEL_FILES)}
    elif options.data is not None and options.template != _ENVIRONMENT:
        model = tiny_model(
            options.data, template=options.template, prompt_key=prompt_key, answer_key=answer_key,
            files=files)
        files |= model.files
        files["experiment.py"] = files["experiment.py"].replace(_TINY_ANSWER, f"else {model.longest_answer})")
    if options.data is not None:
        changes |= {"DATA": _quoted(options.data), "HELD_OUT": "None"}
        if (num_rows := _num_rows(options.data)) >= _FEWEST_TO_HOLD_OUT:
            num_held_out = min(num_rows // 10, _MOST_HELD_OUT)
            files["experiment.py"] = _with_held_out_part(files["experiment.py"], num_held_out)
            del changes["HELD_OUT"]
        files = {name: text for name, text in files.items() if name not in _DATA_FILES}
        if "test_reward.py" in files:
            files["test_reward.py"] = _with_rows(files["test_reward.py"], options)
    if prompt_key != _PROMPT_KEY:
        named = rf"\g<0>, prompt_key={prompt_key!r}"
        files["experiment.py"] = re.sub(r"DatasetConfig\(str\(\w+\)", named, files["experiment.py"])
        if "test_reward.py" in files:
            tests = files["test_reward.py"]
            files["test_reward.py"] = tests.replace(f'row["{_PROMPT_KEY}"]', f"row[{prompt_key!r}]")
    if answer_key != _ANSWER_KEY:
        reward, tests = files["reward.py"], files["test_reward.py"]
        files["reward.py"] = re.sub(rf"\b{_ANSWER_KEY}\b(?=: list|, strict|`)", answer_key, reward)
        files["test_reward.py"] = tests.replace(f'row["{_ANSWER_KEY}"]', f"row[{answer_key!r}]")
    files["experiment.py"] = _with_constants(files["experiment.py"], changes)
    files["README.md"] = "".join(
        line for line in files["README.md"].splitlines(keepends=True) if _describes_written(line, files))
    return files


def _check_columns(options: Namespace) -> None:
    """Raise UserError if a column is named without --data, or if the answers' column is no legal argument."""
    for option, column in (("--prompt-key", options.prompt_key), ("--answer-key", options.answer_key)):
        if column is not None and options.data is None:
            raise UserError(f"{option} names a column of --data, which is not given")
    if options.answer_key is not None and options.template == _ENVIRONMENT:
        raise UserError(
            "--answer-key: --template environment has no reward that reads answers; leave it out, and read "
            "the column in `start` of environment.py")
    key = options.answer_key
    if key is not None and (not key.isidentifier() or keyword.iskeyword(key) or key in _TAKEN):
        raise UserError(
            f"--answer-key {key!r}: the reward function has an argument of this name, so it must be a name "
            f"in Python other than {', '.join(_TAKEN)}")


def _num_rows(data: str) -> int:
    """Return the number of rows of a local file; 0 for rows of the hub."""
    if not Path(data).is_file():
        return 0
    try:
        return len(DatasetRows(DatasetConfig(data)))
    except ValueError as error:
        raise UserError(f"--data{str(error).removeprefix('dataset').removeprefix('.path')}") from error


def _with_held_out_part(experiment: str, count: int) -> str:
    """Return experiment.py with the last `count` rows of DATA held out."""
    about = f"The last {count} rows, which are not trained on (see `split` below); or None."
    for pattern, text in {
        r"(?m)^HELD_OUT = .*$": f"HELD_OUT = DATA  # {about}",
        r"DatasetConfig\(str\(DATA\)": rf'\g<0>, split="train[:-{count}]"',
        r"DatasetConfig\(str\(HELD_OUT\)": rf'\g<0>, split="train[-{count}:]"',
    }.items():
        experiment, num_places = re.subn(pattern, text, experiment)
        assert num_places == 1, pattern
    return experiment


def _with_rows(text: str, options: Namespace) -> str:
    """Return the tests of the reward with the test of every row for these rows, or without it, if they may
    have no answers."""
    if options.model is None and options.template == "grpo" and options.data.endswith(".jsonl"):
        return _with_constants(text, {"ROWS": f"Path({_quoted(options.data)})"})
    kept = text[: text.index("\n\n\ndef test_every_row_has")]
    return re.sub(r"(?m)^(import json\nfrom pathlib import Path\n\n|ROWS = .*\n\n)", "", kept) + "\n"


def _quoted(name: str) -> str:
    """Return a name as a Python string, an existing path as an absolute one."""
    return repr(str(Path(name).resolve()) if Path(name).exists() else name)


def _with_constants(text: str, values: dict[str, str]) -> str:
    """Return Python code in which constants at the top have new values."""
    for name, value in values.items():
        (line,) = re.findall(rf"(?m)^{name} = [^#\n]*?(?=  #|$)", text)
        text = text.replace(line, f"{name} = {value}", 1)
    return text


def _describes_written(line: str, files: dict[str, str]) -> bool:
    """Return whether to keep a line of the README: rows of its table about unwritten files are left out."""
    about = {_MODEL_FILES: "model/config.json", **{name: name for name in _DATA_FILES}}
    return all(file in files for name, file in about.items() if line.startswith(f"| `{name}`"))


def _check_directory(directory: Path, names: Sequence[str]) -> None:
    """Raise UserError unless the files can be written and none of them exists."""
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory} is a file: name a directory")
    if there := [name for name in names if (directory / name).exists()]:
        raise UserError(f"{directory} already has {', '.join(there)}: name another directory")


_COLUMNS = {"grpo": (), "sft": ("completion",), "dpo": ("chosen", "rejected")}
"""Template -> the columns of completions that its experiment reads."""
_MOST_ROWS = 100_000
"""Rows whose characters are counted."""
_LONGEST_ANSWER = 256
_SPECIAL = ("<pad>", "<eos>", "<unk>")
_CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}")
_OF_TEMPLATE = ascii_letters + ": \n"
"""Characters that the chat template writes, whatever the roles are."""


class TinyModel(NamedTuple):
    """The files of a model by name, and how many tokens the longest answer of the rows has."""

    files: dict[str, str]
    longest_answer: int


def tiny_model(
    data: str, *, template: str, prompt_key: str, answer_key: str, files: Mapping[str, str]
) -> TinyModel:
    """Return a model like that of `files`, whose tokenizer knows the characters of these rows.

    Rows of the template `grpo` must have a column `answer_key`.

    Raises UserError if there are no such rows, or if they lack a column that the template reads.
    """
    config = DatasetConfig(data, max_rows=_MOST_ROWS, prompt_key=prompt_key)
    completions = _COLUMNS.get(template, ())
    try:
        rows = read_rows(config)
    except ValueError as error:
        raise UserError(f"--data{str(error).removeprefix('dataset').removeprefix('.path')}") from error
    for row in rows:
        find_conversation(row, config, completions=completions, fills_nulls=data.endswith(".parquet"))
    options = {prompt_key: "prompts with --prompt-key"}
    if template == "grpo":
        options[answer_key] = "answers with --answer-key"
    for column in (*options, *completions):
        if lacking := [number for number, row in enumerate(rows, start=1) if column not in row]:
            way_on = f": name the column of the {options[column]}" if column in options else ""
            raise UserError(
                f"--data {data}: --template {template} reads a column {column!r}, "
                f"and row {lacking[0]} has {', '.join(rows[lacking[0] - 1])}{way_on}")
    answered = (answer_key, *(column for columns in _COLUMNS.values() for column in columns))
    texts = [[_text(row[column]) for column in (prompt_key, *answered) if column in row] for row in rows]
    longest = max(sum(map(len, row)) for row in texts)
    answers = [len(_text(row[column])) for row in rows for column in answered if column in row]
    is_chat = any(not isinstance(row[prompt_key], str) for row in rows)
    new_tokens = min(max(answers, default=0) + 1, _LONGEST_ANSWER)
    characters = {c for row in texts for text in row for c in text} | set(digits)
    vocabulary = (*_SPECIAL, *sorted(characters | set(_OF_TEMPLATE if is_chat else "")))
    fields = json.loads(files["model/config.json"]) | {
        "vocab_size": len(vocabulary), "max_position_embeddings": max(64, longest + new_tokens + 64)}
    settings = json.loads(files["model/tokenizer_config.json"]) | {"unk_token": "<unk>"}
    if is_chat:
        settings["chat_template"] = _CHAT_TEMPLATE
    tokenizer = _tokenizer(json.loads(files["model/tokenizer.json"]), vocabulary)
    contents = {"config": fields, "tokenizer_config": settings, "tokenizer": tokenizer}
    return TinyModel({f"model/{name}.json": _json(content) for name, content in contents.items()}, new_tokens)


def _tokenizer(content: dict[str, Any], vocabulary: Sequence[str]) -> dict[str, Any]:
    """Return a tokenizer.json with another vocabulary of characters."""
    added = content["added_tokens"][0]
    content["added_tokens"] = [added | {"id": i, "content": name} for i, name in enumerate(_SPECIAL)]
    content["pre_tokenizer"]["pattern"] = {"Regex": r"[\s\S]"}  # Line ends are characters, too.
    content["model"] |= {"vocab": {name: i for i, name in enumerate(vocabulary)}, "unk_token": "<unk>"}
    return content


def _text(value: Any) -> str:
    """Return a text, the messages of a chat as the chat template writes them, or another value as text."""
    if isinstance(value, list) and all(isinstance(message, dict) for message in value):
        return "".join(f"{message.get('role')}: {message.get('content')}\n" for message in value)
    return str(value)


def _json(content: Any) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"
