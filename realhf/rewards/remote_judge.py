"""RemoteJudge: a reward that a service gives, over HTTP."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from realhf.errors import UserError
from realhf.rewards.answers import text_of
from realhf.user_input.field_types import check_types, require


@dataclass(frozen=True)
class RemoteJudge:
    """A reward that a service gives: `RemoteJudge(url)` posts samples, with `prompt` it asks a chat model.

    Without `prompt`, it posts `{"prompts": [...], "completions": [...], "columns": {name: [...]}}` to `url`,
    and the service answers with `{"scores": [...]}`: a number or null for each sample. A completion is text.

    With `prompt`, `url` is the address of an OpenAI-compatible chat completion. Each sample is one request
    with the text `prompt`, in which `{prompt}`, `{completion}` and the names of `columns` in braces are
    replaced; the score is the number that `pattern` finds in the reply.

    An error of the service, and a reply without a score, is a failure: see RewardLimits. Requests that take
    place at the same time need `Reward(RemoteJudge(...), concurrency=...)`.
    """

    url: str
    columns: tuple[str, ...] = ()  # Columns of the dataset that are sent or shown.
    headers_from: dict[str, str] = field(default_factory=dict)
    """Headers with secrets: name of the header -> name of the environment variable that has its value. The
    values are read when a request is made, and are not written anywhere."""
    timeout_seconds: float = 60.0  # Longest time of a request.
    prompt: str | None = None
    model: str = ""  # The model's name at a service for chats.
    pattern: str = r"(-?\d+(?:\.\d+)?)"  # The last match in a chat's reply is its score: the first group.
    scale: float = 1.0  # Scores of chats are divided by this.
    __name__: ClassVar[str] = "remote_judge"

    def __post_init__(self) -> None:
        check_types(self, "RemoteJudge.")
        is_url = re.match(r"https?://[^/]", self.url) is not None
        require(is_url, "RemoteJudge.url", self.url, "begin with http:// or https://")
        require(self.timeout_seconds > 0, "RemoteJudge.timeout_seconds", self.timeout_seconds, "be above 0")
        require(self.scale > 0, "RemoteJudge.scale", self.scale, "be above 0")
        has_group = _groups(self.pattern) >= 1
        require(has_group, "RemoteJudge.pattern", self.pattern, "be a regular expression with a group")
        model = self.prompt is None or bool(self.model)
        require(model, "RemoteJudge.model", repr(self.model), "name a model, as prompt is given")

    @property
    def column_names(self) -> tuple[str, ...]:
        """The columns that the reward reads."""
        return self.columns

    @cached_property
    def _client(self) -> Any:
        import httpx

        return httpx.AsyncClient(timeout=self.timeout_seconds, limits=httpx.Limits(max_connections=None))

    async def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        """Return the reward of each completion."""
        texts = [text_of(completion) for completion in completions]
        if self.prompt is None:
            sent = {name: columns[name] for name in self.columns}
            document = {"prompts": list(prompts), "completions": texts, "columns": sent}
            return self._scores_in(await self._post(document), len(texts))
        scores: list[float | None] = []
        for i, text in enumerate(texts):
            shown = {name: str(columns[name][i]) for name in self.columns}
            shown |= {"prompt": _prompt_text(prompts[i]), "completion": text}
            scores.append(await self._asked(self.prompt, shown))
        return scores

    async def _asked(self, template: str, shown: Mapping[str, str]) -> float:
        """Return the score that a chat model gives."""
        content = re.sub(r"\{(\w+)\}", lambda matches: shown.get(matches[1], matches[0]), template)
        messages = [{"role": "user", "content": content}]
        reply = await self._post({"model": self.model, "messages": messages, "temperature": 0.0})
        try:
            text = str(reply["choices"][0]["message"]["content"])
        except (KeyError, IndexError, TypeError) as error:
            raise UserError(f"{self.url} answered {_short(reply)}: it must be a chat completion") from error
        matches = re.findall(self.pattern, text, re.DOTALL)
        if not matches:
            raise UserError(f"{self.url} answered {_short(text)}, in which the pattern finds no score")
        last = matches[-1] if isinstance(matches[-1], str) else matches[-1][0]
        return float(last) / self.scale

    async def _post(self, document: Mapping[str, Any]) -> Any:
        """Post a JSON document and return the reply. Raises UserError."""
        import httpx

        try:
            response = await self._client.post(self.url, json=document, headers=self._headers())
            response.raise_for_status()
            return json.loads(response.text)
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            raise UserError(f"{self.url} answered {status}: {_short(error.response.text)}") from error
        except (httpx.HTTPError, ValueError) as error:
            raise UserError(f"{self.url}: {type(error).__name__} {error}".strip()) from error

    def _headers(self) -> dict[str, str]:
        """Return the headers, with values from the environment. Raises UserError if one is not set."""
        if missing := [name for name in self.headers_from.values() if name not in os.environ]:
            raise UserError(f"RemoteJudge.headers_from: the environment variable {missing[0]} is not set")
        return {header: os.environ[name] for header, name in self.headers_from.items()}

    def _scores_in(self, reply: Any, count: int) -> list[float | None]:
        """Return the scores of a reply. Raises UserError."""
        scores = reply.get("scores") if isinstance(reply, Mapping) else None
        if not isinstance(scores, list) or len(scores) != count:
            rule = 'it must be {"scores": [...]} with a number for each sample'
            raise UserError(f"{self.url} answered {_short(reply)}: {rule}")
        return scores


def _groups(pattern: str) -> int:
    try:
        return re.compile(pattern).groups
    except re.error:
        return 0


def _prompt_text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{message.get('role')}: {message.get('content')}" for message in prompt)


def _short(value: Any) -> str:
    return repr(value)[:200]
