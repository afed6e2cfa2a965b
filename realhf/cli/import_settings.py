"""`realhf import`: writes an experiment from TRL's or verl's settings. Free of torch.

Settings are a command line of TRL or verl, a YAML file of either, a shell script with such a command, or a
Python script of TRL, which is read and not executed.
"""

import ast
import json
import operator
import re
import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from realhf.cli.import_trl import KINDS, imported_from_trl
from realhf.cli.import_verl import flattened, imported_from_verl
from realhf.cli.imported import Code, Imported, UnknownValue, number
from realhf.errors import UserError, naming
from realhf.user_input.files import read_text
from realhf.user_input.shipped import load_yaml
from realhf.user_input.suggest import did_you_mean

HELP = "write an experiment from the settings of TRL or verl"
EXAMPLES = (
    "realhf import train_grpo.py -o mine.py",
    "realhf import trl grpo --config grpo.yaml --learning_rate 2e-6 -o mine.py",
    "realhf import verl algorithm.adv_estimator=grpo data.train_batch_size=256 -o mine.py")
_BY_FIELD = {
    "num_generations": "grpo", "reward_funcs": "grpo", "desirable_weight": "kto", "loss_weights": "dpo",
    "precompute_ref_log_probs": "dpo", "label_smoothing": "dpo", "center_rewards_coefficient": "reward",
    "packing": "sft", "assistant_only_loss": "sft", "dataset_text_field": "sft"}
"""A setting that one of TRL's trainers alone has -> the trainer."""
_VERL_PARTS = ("actor_rollout_ref", "data", "algorithm", "trainer", "critic", "reward_model")
_LISTS = ("reward_funcs", "reward_weights", "lora_target_modules", "report_to", "loss_weights")
"""Options of TRL's command line with several words."""
_LAUNCHERS = re.compile(r"--(?:num_processes|nproc[-_]per[-_]node)[ =](\d+)")


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments of `realhf import`."""
    sources = "FILE | trl TRAINER [--option value ...] | verl [a.b=value ...]"
    parser.usage = f"{parser.prog} {sources}  [-o EXP.py]"
    add = parser.add_argument
    add("-o", "--output", metavar="EXP.py", help="experiment file to write; default: standard output")
    text = f"trainer of a YAML file of TRL, if its settings do not tell: {', '.join(KINDS)}"
    add("--trainer", metavar="NAME", help=text)
    text = "devices of TRL's run, on which its batch sizes depend; default: 1"
    add("--devices", type=int, metavar="N", help=text)


def main(options: Namespace, words: list[str]) -> int:
    """Write the experiment and return the exit code."""
    if not words:
        raise UserError(f"{options.parser.prog} needs settings to read: {options.parser.usage}")
    target = None if options.output is None else Path(options.output)
    if target is not None and target.exists():
        raise UserError(f"--output {target} exists: name a new file")
    source, *rest = words
    run = _read(source, rest, options)
    named = "EXP.py" if target is None else str(target)
    text = run.text(
        source=" ".join(words), command=shlex.join(["realhf", "run", named, *run.command]))
    if target is None:
        print(text)
        return 0
    target.write_text(text)
    print(f"realhf: wrote {target}; its first lines say what became of each setting", file=sys.stderr)
    return 0


def _read(source: str, words: list[str], options: Namespace) -> Imported:
    devices = 1 if options.devices is None else options.devices
    if devices < 1:
        raise UserError(f"--devices {devices}: it must be at least 1")
    if source == "trl":
        trainer = _trainer(words[0] if words else options.trainer)
        return imported_from_trl(trainer, _options_of_trl(words[1:]), devices=devices)
    if source == "verl":
        files = [word for word in words if word.endswith((".yaml", ".yml")) and "=" not in word]
        given = flattened(_yaml(files[0])) if files else {}
        return imported_from_verl(given | _overrides([word for word in words if word not in files]))
    if not Path(source).is_file():
        raise UserError(f"{source}: there is no such file{did_you_mean(source, ('trl', 'verl'))}")
    if source.endswith(".py"):
        if words:
            raise UserError(f"{words[0]!r} has no use behind a script: change what has been written")
        trainer, given = Script(Path(source)).settings()
        with naming(source):
            return imported_from_trl(trainer, given, devices=devices)
    if source.endswith((".sh", ".bash", ".slurm")):
        return _from_shell(source, words, options)
    if not source.endswith((".yaml", ".yml")):
        raise UserError(f"{source}: it must be a YAML file, a Python script or a shell script")
    document = _yaml(source)
    with naming(source):
        if sum(isinstance(document.get(part), Mapping) for part in _VERL_PARTS) >= 1 or any(
                "." in name for name in document):
            return imported_from_verl(flattened(document) | _overrides(words))
        given = {name: number(value) for name, value in document.items()} | _options_of_trl(words)
        return imported_from_trl(_trainer(options.trainer, given), given, devices=devices)


def _trainer(named: str | None, given: Mapping[str, Any] | None = None) -> str:
    """Return TRL's trainer: the one that is named, or the one whose settings these are."""
    found = sorted({_BY_FIELD[name] for name in given or {} if name in _BY_FIELD})
    if named is None and len(found) == 1:
        return found[0]
    if named is None:
        raise UserError(f"which trainer of TRL is it? --trainer names it: {', '.join(KINDS)}")
    if named not in KINDS:
        raise UserError(
            f"there is no trainer {named!r}{did_you_mean(named, list(KINDS))}: legal are {', '.join(KINDS)}")
    return named


def _yaml(path: str) -> dict[str, Any]:
    document = load_yaml(path, lambda settings: settings, what="settings")
    if not isinstance(document, dict):
        raise UserError(f"{path} must have settings, and is {type(document).__name__}")
    return document


def _options_of_trl(words: Sequence[str]) -> dict[str, Any]:
    """Return the settings of TRL's command line; those of a file in --config come first."""
    settings: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").replace("-", "_").partition("=")
            if not equals and name.startswith("no_"):
                name = name.removeprefix("no_")
                settings[name] = False
            else:
                settings[name] = _value(value) if equals else True
        elif not name:
            raise UserError(f"{word!r}: an option of TRL, such as --learning_rate, comes before its value")
        elif name in _LISTS:
            before = settings[name]
            settings[name] = [*(before if isinstance(before, list) else []), _value(word)]
        else:
            settings[name] = _value(word)
    if (file := settings.pop("config", None)) is not None:
        settings = {key: number(value) for key, value in _yaml(str(file)).items()} | settings
    return settings


def _overrides(words: Sequence[str]) -> dict[str, Any]:
    """Return the overrides of hydra, `a.b=value`."""
    settings: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            raise UserError(f"{word}: hydra's own options have no use here, only overrides such as a.b=value")
        if word.startswith("~"):
            continue  # It removes a setting, which then has its default.
        if not equals:
            raise UserError(f"{word!r}: verl's settings have the form a.b=value")
        settings |= flattened({name.lstrip("+"): _value(value)})
    return settings


def _value(text: str) -> Any:
    """Return what a word stands for: a number, a truth value, a list or a dict, or the text itself."""
    if text[:1] not in ("[", "{"):
        return number(text.strip("'\""))
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError):
            continue
    if text[0] == "[" and text[-1] == "]":  # As hydra writes lists, without quotation marks.
        return [number(part.strip().strip("'\"")) for part in text[1:-1].split(",") if part.strip()]
    return text


def _from_shell(source: str, words: list[str], options: Namespace) -> Imported:
    """Read the command of a shell script, with the values of its plain variables."""
    text = read_text(source).replace("\\\n", " ")
    variables: dict[str, str] = {}

    def filled(line: str) -> str:
        return re.sub(
            r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)",
            lambda m: variables.get(m[1] or m[3], m[2] if m[2] is not None else m[0]), line)

    for line in text.splitlines():
        if match := re.fullmatch(r"\s*(?:export\s+)?(\w+)=(\S*|\"[^\"]*\"|'[^']*')\s*(?:#.*)?", line):
            variables[match[1]] = filled(match[2].strip("'\""))
            continue
        is_verl = "verl.trainer.main_ppo" in line
        found = re.search(r"trl(?:/scripts/|\.scripts\.| )(\w+?)(?:\.py)?(?=\s|$)", line)
        if not is_verl and (found is None or found[1] not in KINDS):
            continue
        with naming(source):
            if is_verl:
                _, _, after = filled(line).partition("verl.trainer.main_ppo")
                given = shlex.split(after, comments=True)
                return imported_from_verl(_overrides([
                    word for word in [*given, *words] if "=" in word and not word.startswith("--")]))
            assert found is not None
            devices = options.devices
            if devices is None:
                launcher = _LAUNCHERS.search(filled(line))
                devices = 1 if launcher is None else int(launcher[1])
            given = shlex.split(filled(line[found.end():]), comments=True)
            return imported_from_trl(found[1], _options_of_trl([*given, *words]), devices=devices)
    raise UserError(f"{source} has no command of TRL (trl grpo ...) or of verl (verl.trainer.main_ppo ...)")


# Python scripts


_TRAINERS = {
    "GRPOTrainer": "grpo", "RLOOTrainer": "rloo", "DPOTrainer": "dpo", "SFTTrainer": "sft",
    "KTOTrainer": "kto", "RewardTrainer": "reward"}
_RENAMED = {"r": "lora_r", "lora_dropout": "lora_dropout", "target_modules": "lora_target_modules"}
"""Fields of peft's LoraConfig -> options of TRL's command line."""
_OF_DATASETS = (
    "map", "filter", "select", "shuffle", "rename_column", "rename_columns", "remove_columns",
    "select_columns", "take", "skip", "with_format", "cast", "cast_column", "train_test_split")
"""Methods of a Dataset that return another."""
_BUILDERS = ("json", "csv", "parquet")
_OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv}
_UNUSED = ("processing_class", "tokenizer", "self", "task_type", "bias")


class Script:
    """A Python script of TRL, of which constants are read and nothing is executed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._text = read_text(path)
        try:
            self._tree = ast.parse(self._text)
        except SyntaxError as error:
            raise UserError(f"{path} line {error.lineno} is no Python: {error.msg}") from error
        self._values = {
            name: node.value for node in ast.walk(self._tree)
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
            for name in _assigned(node)}
        """Variable -> the expression that it was last set to."""
        self._statements = {name: node for node in self._tree.body for name in _bound(node)}
        """Name -> the statement at the top of the file that makes it."""

    def settings(self) -> tuple[str, dict[str, Any]]:
        """Return the trainer and its settings, by the names of TRL's command line."""
        calls = [node for node in ast.walk(self._tree) if isinstance(node, ast.Call)]
        trainers = [call for call in calls if _name_of(call.func) in _TRAINERS]
        if not trainers:
            raise UserError(f"{self._path} calls no trainer of TRL: legal are {', '.join(_TRAINERS)}")
        if len(trainers) > 1:
            lines = " and ".join(str(call.lineno) for call in trainers)
            raise UserError(f"{self._path} has {len(trainers)} trainers, in lines {lines}: it must have one")
        (call,) = trainers
        positional = ("model", "reward_funcs" if "reward" not in _TRAINERS[_name_of(call.func)] else "args")
        arguments: dict[str, ast.expr] = dict(zip(positional, call.args, strict=False)) | {
            keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
        settings: dict[str, Any] = {}
        if any(keyword.arg is None for keyword in call.keywords):
            settings["**"] = UnknownValue("keywords that the script makes")
        for name, node in arguments.items():
            if name == "args":
                settings |= self._keywords(node)
            elif name == "model":
                settings |= self._model(node)
            elif name == "peft_config":
                settings |= {"use_peft": True, **{
                    _RENAMED.get(key, key): value for key, value in self._keywords(node).items()
                    if key not in _UNUSED}}
            elif name in ("train_dataset", "eval_dataset"):
                settings |= self._rows(node, name)
            elif name == "reward_funcs":
                settings[name] = self._functions(node)
            elif name not in _UNUSED:
                settings[name] = self._value(node)
        settings |= self._init_kwargs(settings.pop("model_init_kwargs", None))
        return _TRAINERS[_name_of(call.func)], settings

    def _keywords(self, node: ast.expr) -> dict[str, Any]:
        """Return the keyword arguments of a call, such as GRPOConfig(...)."""
        call = self._resolved(node)
        if not isinstance(call, ast.Call):
            return {"args": UnknownValue(ast.unparse(node))}
        return {keyword.arg or "**": self._value(keyword.value) for keyword in call.keywords}

    def _model(self, node: ast.expr) -> dict[str, Any]:
        """Return the model's name, also of a call of `from_pretrained`."""
        found = self._resolved(node)
        if isinstance(found, ast.Call) and _name_of(found.func) == "from_pretrained" and found.args:
            kwargs = {keyword.arg or "**": self._value(keyword.value) for keyword in found.keywords}
            return {"model_name_or_path": self._value(found.args[0]), **self._init_kwargs(kwargs)}
        value = self._value(node)
        if isinstance(value, UnknownValue):
            raise UserError(
                f"{self._path} line {node.lineno}: the model is {value.text}, which is known only when the "
                "script runs: write its name as text, or import the command (realhf import trl grpo ...)")
        return {"model_name_or_path": value}

    def _init_kwargs(self, kwargs: Any) -> dict[str, Any]:
        names = {"torch_dtype": "dtype", "revision": "model_revision"}
        if not isinstance(kwargs, Mapping):
            return {}
        return {str(names.get(name, name)): value for name, value in kwargs.items()}

    def _rows(self, node: ast.expr, argument: str) -> dict[str, Any]:
        """Return the data set of a call of `load_dataset`, with functions that are mapped over it."""
        found = self._resolved(node)
        unread: dict[str, Any] = {}
        maps: list[ast.expr] = []
        split = None
        while True:
            if isinstance(found, ast.Subscript):
                split = self._value(found.slice)
                found = self._resolved(found.value)
            elif isinstance(found, ast.Call) and isinstance(found.func, ast.Attribute) and (
                    found.func.attr in _OF_DATASETS):
                if found.func.attr == "map" and len(found.args) == 1 and not found.keywords:
                    maps.append(found.args[0])
                else:
                    called = ast.unparse(ast.Call(ast.Name(found.func.attr), found.args, found.keywords))
                    unread[f"{argument}.{found.func.attr}"] = UnknownValue(
                        called, "not carried over: DatasetConfig(map=f) can do it, a row for which f returns "
                        "None is left out")
                found = self._resolved(found.func.value)
            else:
                break
        if not isinstance(found, ast.Call) or _name_of(found.func) != "load_dataset":
            return {argument: {"path": self._code(node)}}
        named = dict(zip(("path", "name"), map(self._value, found.args), strict=False)) | {
            keyword.arg: self._value(keyword.value) for keyword in found.keywords
            if keyword.arg is not None}
        is_of_files = named.get("path") in _BUILDERS
        split = named.get("split", split) or "train"
        path = named.pop("data_files", None) if is_of_files else named["path"]
        path = path.get(split) if isinstance(path, Mapping) else path
        rows = {"path": tuple(path) if isinstance(path, list) else path, "name": named.get("name")}
        if not is_of_files or split != "test":
            rows["split"] = split
        if len(maps) == 1:
            rows["map"] = self._code(maps[0])
        elif maps:
            unread[f"{argument}.map"] = UnknownValue(
                ", ".join(map(ast.unparse, reversed(maps))), "write one function for DatasetConfig(map=...)")
        return {argument: rows, **unread}

    def _code(self, node: ast.expr) -> Code:
        """Return an expression with the statements of the script that make what it names."""
        return Code(ast.unparse(node), (), tuple(self._definitions(node)))

    def _functions(self, node: ast.expr) -> list[Any]:
        """Return the reward functions: names of models, and the functions of the script."""
        found = self._resolved(node)
        listed = found.elts if isinstance(found, ast.List | ast.Tuple) else [node]
        values = []
        for each in listed:
            value = self._value(each)
            values.append(value if isinstance(value, str) else self._code(each))
        return values

    def _definitions(self, node: ast.expr) -> Iterator[str]:
        """Yield the script's statements that make what an expression names, in their order."""
        needed: list[ast.stmt] = []
        waiting: list[ast.AST] = [node]
        while waiting:
            for inner in ast.walk(waiting.pop()):
                statement = self._statements.get(inner.id) if isinstance(inner, ast.Name) else None
                if statement is not None and statement not in needed:
                    needed.append(statement)
                    waiting.append(statement)
        for statement in self._tree.body:
            if statement in needed:
                decorators = getattr(statement, "decorator_list", [])
                first = min([statement.lineno, *(each.lineno for each in decorators)])
                yield "\n".join(self._text.splitlines()[first - 1 : statement.end_lineno])

    def _resolved(self, node: ast.expr) -> ast.expr:
        """Return the expression behind a variable."""
        seen: list[str] = []
        while isinstance(node, ast.Name) and node.id in self._values and node.id not in seen:
            seen.append(node.id)
            node = self._values[node.id]
        return node

    def _value(self, node: ast.expr) -> Any:
        """Return the value of an expression of constants, else UnknownValue."""
        try:
            return self._constant(node)
        except (ValueError, TypeError, ArithmeticError, RecursionError):
            return UnknownValue(ast.unparse(node))

    def _constant(self, node: ast.expr) -> Any:
        node = self._resolved(node)
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.List | ast.Tuple):
            return [self._constant(each) for each in node.elts]
        if isinstance(node, ast.Dict):
            keys = [self._constant(key) for key in node.keys if key is not None]
            return dict(zip(keys, map(self._constant, node.values), strict=True))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._constant(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](self._constant(node.left), self._constant(node.right))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return node.attr  # A dtype.
        raise ValueError(ast.unparse(node))


def _name_of(function: ast.expr) -> str:
    """Return the last name of what is called: C for C(...), a.C(...) and C.from_x(...)."""
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def _assigned(node: ast.AST) -> Iterator[str]:
    """Yield the variables that a statement sets to one value each."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    if isinstance(node, ast.Assign | ast.AnnAssign):
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def _bound(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement makes."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    else:
        yield from _assigned(node)
