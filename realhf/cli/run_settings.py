"""RunSettings: how a run made prompts and sampled answers, read by `realhf eval`. Free of torch."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from realhf.calls import SamplingConfig
from realhf.data.dataset import DatasetConfig
from realhf.user_input.files import read_json

_CONFIG = "config.json"
_OF_PROMPTS = ("prompt_key", "chat", "system_prompt", "tools", "tools_key", "chat_template_kwargs",
               "max_prompt_tokens", "too_long")
OF_CHATS = ("chat", "system_prompt", "tools", "tools_key", "chat_template_kwargs")
"""Fields of a data set that make chats of prompts that are text."""
_MAX_SHOWN = 60
"""Most characters of a value in the sentence about the settings."""


@dataclass(frozen=True)
class RunSettings:
    """The settings with which a run made prompts (of DatasetConfig) and sampled answers (of SamplingConfig).

    They are the settings of one of its held-out sets, or of training if it has none.
    """

    run: Path
    prompts: Mapping[str, Any]
    sampling: Mapping[str, Any]
    has_own_sampling: bool = False  # Whether the sampling is that of the set, and not of training.
    unused: tuple[str, ...] = ()
    """Settings of the run, in words, of which config.json has only the names, such as its map function."""

    def temperature(self, samples: int) -> float:
        """Return the temperature with which the run would draw so many answers to a prompt.

        It is 1 if several answers would be equal.
        """
        if samples == 1 and not self.has_own_sampling:
            return 0.0
        temperature: float = self.sampling.get("temperature", 1.0)
        return 1.0 if samples > 1 and temperature == 0 else temperature

    def described(self, prompts: Mapping[str, Any], sampling: Mapping[str, Any]) -> str:
        """Return a sentence that names the settings that were taken from the run."""
        words = [*_prompt_words(prompts), *_sampling_words(sampling)]
        text = f"prompts and limits as in {self.run}"
        text += f": {', '.join(words)}" if words else ""
        if self.unused:
            instead = f"`realhf eval EXP.py --model {self.run}` does"
            text += f"; this does not apply {' and '.join(self.unused)}: {instead}"
        return text


def find_run(model: str) -> Path | None:
    """Return the directory of the run that has written a model; None for other models.

    `model` is the run directory or one of its hf/step_N.
    """
    path = Path(model)
    for run in (path, path.parent.parent) if path.parent.name == "hf" else (path,):
        has_run = (run / "metrics.jsonl").is_file() or (run / "hf").is_dir()
        if has_run and (run / _CONFIG).is_file():
            return run
    return None


def read_settings(run: Path, *, name: str, path: str) -> RunSettings | None:
    """Return the settings of a run with which to evaluate the file `path` as the set `name`.

    Of several held-out sets of the run, take that of this name, else of this file, else the first.
    Return None if config.json is not that of a run. Raises UserError if it cannot be read.
    """
    file = run / _CONFIG
    config = read_json(file)
    if not isinstance(config, dict) or not isinstance(training := config.get("dataset"), dict):
        return None
    sets = _sets(config.get("eval_dataset"))
    by_path = [held_out for held_out in sets.values() if held_out["dataset"].get("path") == path]
    default = {"dataset": training, "sampling": None}
    chosen = sets.get(name) or next(iter([*by_path, *sets.values()]), default)
    own_sampling = chosen.get("sampling")
    saved_sampling = own_sampling or config.get("sampling") or {}
    names = {field.name for field in fields(SamplingConfig)}
    dataset = _first_part(chosen["dataset"])
    prompts = {key: dataset[key] for key in _OF_PROMPTS if key in dataset}
    if "tools" in prompts:
        prompts["tools"] = tuple(prompts["tools"])
    unused = _map_words(dataset.get("map"))
    unused += _reward_words(
        chosen.get("function") or config.get("eval_function") or config.get("reward_function"))
    sampling = {key: value for key, value in saved_sampling.items() if key in names}
    return RunSettings(
        run, prompts, sampling, has_own_sampling=own_sampling is not None, unused=tuple(unused))


def _sets(saved: Any) -> dict[str, dict[str, Any]]:
    """Return the held-out sets of a run by name, each as the fields of an Evaluation."""
    if not isinstance(saved, dict):
        return {}
    if "prompt_key" in saved or "correct_above" in saved:
        return {"": _set(saved)}
    return {name: _set(entry) for name, entry in saved.items() if isinstance(entry, dict)}


def _set(saved: dict[str, Any]) -> dict[str, Any]:
    return saved if "correct_above" in saved else {"dataset": saved}


def _first_part(dataset: Any) -> dict[str, Any]:
    """Return the fields of a data set, or of the first one of a mixture."""
    parts = dataset.get("parts")
    return dict(parts[0] if parts else dataset)


def _map_words(name: str | None) -> list[str]:
    return [] if name is None else [f"its map function {_last(name)}"]


def _reward_words(saved: Any) -> list[str]:
    """Describe the rewards of a run; config.json has the names of functions, and the fields of objects."""
    rewards = saved if isinstance(saved, list) else [saved] * (saved is not None)
    if not rewards:
        return []
    names = [name for reward in rewards if (name := _reward_name(reward))]
    shown = f" ({', '.join(names)})" if names else ""
    return [f"its own reward{'s' if len(rewards) > 1 else ''}{shown}"]


def _reward_name(reward: Any) -> str | None:
    if isinstance(reward, dict):
        function = reward.get("function")
        return reward.get("name") or (_last(function) if isinstance(function, str) else None)
    return _last(str(reward))


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _prompt_words(prompts: Mapping[str, Any]) -> list[str]:
    """Describe the settings of prompts that are not the defaults."""
    words = []
    if prompts.get("prompt_key", "prompt") != "prompt":
        words.append(f"prompts of column {prompts['prompt_key']!r}")
    if prompts.get("system_prompt") is not None:
        words.append(f"system prompt {_short(prompts['system_prompt'])}")
    elif prompts.get("chat"):
        words.append("prompts as chats")
    if tools := prompts.get("tools"):
        words.append(f"{len(tools)} tools" if len(tools) > 1 else "1 tool")
    if prompts.get("tools_key") is not None:
        words.append(f"tools of column {prompts['tools_key']!r}")
    words += [f"{key}={_short(value)}" for key, value in (prompts.get("chat_template_kwargs") or {}).items()]
    usual = DatasetConfig()
    if prompts.get("max_prompt_tokens", usual.max_prompt_tokens) != usual.max_prompt_tokens:
        words.append(f"at most {prompts['max_prompt_tokens']} prompt tokens")
    if prompts.get("too_long", usual.too_long) != usual.too_long:
        words.append(f"too_long {prompts['too_long']}")
    return words


def _sampling_words(sampling: Mapping[str, Any]) -> list[str]:
    """Describe the settings of sampling: the limit of answers, and those that are not the defaults."""
    words = []
    usual = SamplingConfig()
    for name, value in sampling.items():
        now = tuple(value) if isinstance(value, list) else value
        if name == "max_new_tokens":
            words.append(f"{value} new tokens")
        elif name == "temperature":
            words.append(f"temperature {value:g}" if value else "greedy")
        elif now != getattr(usual, name):
            words.append(f"{name.replace('_', ' ')} {_shown(value)}")
    return words


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(_short(part) for part in value)
    return _short(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 4]}...{text[0]}"
