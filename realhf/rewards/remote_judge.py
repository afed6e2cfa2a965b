"""RemoteJudge: a reward that a service gives, over HTTP."""

from __future__ import annotations

import asyncio
import email.utils
import json
import os
import re
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from realhf.errors import UserError
from realhf.rewards.answers import UserPattern, after_thinking, text_of
from realhf.rewards.limits import ServiceError
from realhf.user_input.field_types import check_types, require

if TYPE_CHECKING:
    import httpx

# Repetitions in these expressions are limited, so that no reply takes long.
_NUMBER = r"[-+]?\d{1,20}(?:\.\d{1,20})?"
_SPACE = r"\s{0,9}"
_OF = rf"{_SPACE}(?:/|out\s{{1,9}}of){_SPACE}"
_MARKS = r"""[ \t"'*_`\[\]()]{0,9}"""
_SCORE = rf"(?P<score>{_NUMBER})[*_`]{{0,3}}(?:{_OF}[*_`]{{0,3}}(?P<scale>{_NUMBER}))?"
_END = rf"(?![\w%])(?![.,]\d)(?!{_SPACE}(?:[-–]|to){_SPACE}\d)"  # Not within a number or a range.
_LABEL = rf"\b(?:score|rating|grade)\b{_MARKS}(?:\([^()]{{0,99}}\))?{_MARKS}(?:[:=]|\bis\b){_SPACE}{_MARKS}"
_LABELLED = re.compile(f"{_LABEL}{_SCORE}{_END}", re.IGNORECASE)
_REMARK = r"\.?(?:\([^()\n]{0,99}\))?[ \t.\r]{0,9}"
_ALONE = re.compile(f"^{_MARKS}{_SCORE}{_END}{_MARKS}{_REMARK}$", re.MULTILINE)
_SCALED = re.compile(rf"(?<![\w./])(?P<score>{_NUMBER}){_OF}(?P<scale>{_NUMBER}){_END}(?!{_SPACE}/)")
_BUSY = (408, 409, 425, 429)
"""Answers by which a service refuses to work now, besides those from 500 on."""
_GZIP = ("gzip", "x-gzip")
_GZIP_WINDOW = 31
"""The kind of window by which zlib reads gzip alone."""


@dataclass(frozen=True)
class RemoteJudge:
    """A reward that a service gives: `RemoteJudge(url)` posts samples, with `prompt` it asks a chat model.

    Without `prompt`, it posts `{"prompts": [...], "completions": [...], "columns": {name: [...]}}` to `url`,
    and the service answers with `{"scores": [...]}`: a number or null for each sample. A completion is text.

    With `prompt`, `url` is the address of an OpenAI-compatible chat completion. Each sample is one request
    with the text `prompt`, in which `{prompt}`, `{completion}` and the names of `columns` in braces are
    replaced. The model gives a score from `lowest` to `scale`; see `score_in`.

    An error of the service, a reply without a score, and a score out of range are failures: see RewardLimits.
    Requests that take place at the same time need `Reward(RemoteJudge(...), concurrency=...)`.
    """

    url: str
    columns: tuple[str, ...] = ()  # Columns of the dataset that are sent or shown.
    headers_from: dict[str, str] = field(default_factory=dict)
    """Headers with secrets: name of the header -> name of the environment variable that has its value. The
    values are read when a request is made, and are not written anywhere."""
    timeout_seconds: float = 60.0  # Longest time of a request, from its first byte to the last of the reply.
    prompt: str | None = None
    model: str = ""  # The model's name at a service for chats.
    pattern: str | None = None
    """A regular expression for the score in a chat's reply: the first group of its last match. None: the rule
    of `score_in`."""
    scale: float = 1.0  # The highest score that a chat model may give; scores are divided by it.
    lowest: float = 0.0  # The lowest score that a chat model may give.
    max_reply_mib: float = 8.0  # Largest reply, after decompression.
    __name__: ClassVar[str] = "remote_judge"

    def __post_init__(self) -> None:
        check_types(self, "RemoteJudge.")
        is_url = re.match(r"https?://[^/]", self.url) is not None
        require(is_url, "RemoteJudge.url", self.url, "begin with http:// or https://")
        require(self.timeout_seconds > 0, "RemoteJudge.timeout_seconds", self.timeout_seconds, "be above 0")
        require(self.scale > 0, "RemoteJudge.scale", self.scale, "be above 0")
        below = self.lowest < self.scale
        require(below, "RemoteJudge.lowest", self.lowest, f"be below the scale, {self.scale:g}")
        require(self.max_reply_mib > 0, "RemoteJudge.max_reply_mib", self.max_reply_mib, "be above 0")
        has_group = self.pattern is None or _groups(self.pattern) >= 1
        require(has_group, "RemoteJudge.pattern", self.pattern, "be a regular expression with a group")
        model = self.prompt is None or bool(self.model)
        require(model, "RemoteJudge.model", repr(self.model), "name a model, as prompt is given")

    @property
    def column_names(self) -> tuple[str, ...]:
        return self.columns

    @cached_property
    def _client(self) -> httpx.AsyncClient:
        import httpx

        return httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))

    async def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        texts = [text_of(completion) for completion in completions]
        if self.prompt is None:
            sent = {name: columns[name] for name in self.columns}
            document = {"prompts": list(prompts), "completions": texts, "columns": sent}
            return self._scores_in(await self._post(document), len(texts))
        scores: list[float | None] = []
        for i, text in enumerate(texts):
            shown = {name: str(columns[name][i]) for name in self.columns}
            shown |= {"prompt": prompt_text(prompts[i]), "completion": text}
            scores.append(await self._asked(self.prompt, shown))
        return scores

    async def _asked(self, template: str, shown: Mapping[str, str]) -> float:
        """Return the score that a chat model gives."""
        content = re.sub(r"\{(\w+)\}", lambda matches: shown.get(matches[1], matches[0]), template)
        messages = [{"role": "user", "content": content}]
        reply = await self._post({"model": self.model, "messages": messages, "temperature": 0.0})
        try:
            text = reply["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            text = None
        if not isinstance(text, str):
            raise UserError(f"{self.url} answered {_short(reply)}: it must be a chat completion with text")
        return self.score_in(text) / self.scale

    def score_in(self, reply: str) -> float:
        """Return the score that a chat's reply gives. Raises UserError without one, or if it is out of range.

        It is the last number behind `score`, `rating` or `grade` and a colon, an equals sign or `is`, else
        the only number that stands alone on a line, else the only one with a scale, as in `8/10` or
        `8 out of 10`. A number may be marked up, and its scale must be `scale`. Thinking before `</think>`
        does not count.
        """
        return score_in_reply(
            reply, pattern=self.pattern, scale=self.scale, lowest=self.lowest, who=self.url,
            fields="RemoteJudge")

    async def _post(self, document: Mapping[str, Any]) -> Any:
        """Post a JSON document and return the reply. Raises ServiceError, and UserError about the samples."""
        import httpx

        try:
            async with asyncio.timeout(self.timeout_seconds):
                reply = await self._reply(document)
        except TimeoutError as error:
            limit = f"within {self.timeout_seconds:g} s (RemoteJudge.timeout_seconds)"
            raise ServiceError(f"{self.url} has not answered {limit}") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServiceError(f"{self.url}: {type(error).__name__} {error}".strip()) from error
        try:
            return json.loads(reply)
        except RecursionError as error:
            raise UserError(f"{self.url} answered JSON that is nested too deeply") from error
        except ValueError as error:
            raise UserError(f"{self.url} answered {_short(reply)}, which is no JSON ({error})") from error

    async def _reply(self, document: Mapping[str, Any]) -> bytes:
        headers = {"Accept-Encoding": "gzip", **self._headers()}
        async with self._client.stream("POST", self.url, json=document, headers=headers) as response:
            if response.is_success:
                return await self._body(response)
            status = response.status_code
            try:
                said = _short((await self._body(response)).decode(errors="replace"))
            except UserError as error:
                said = str(error)
            sentence = f"{self.url} answered {status}: {said}"
            if status >= 500 or status in _BUSY:
                raise ServiceError(sentence, wait_seconds=_retry_after(response.headers.get("Retry-After")))
            if status in (400, 413, 422):  # It refuses these samples.
                raise UserError(sentence)
            raise ServiceError(sentence, is_final=True)

    async def _body(self, response: httpx.Response) -> bytes:
        """Return the bytes of a reply, of which no more than the limit are decompressed. Raises UserError."""
        encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding not in ("", "identity", *_GZIP):
            raise UserError(f"{self.url} answered with the Content-Encoding {encoding!r}: legal is gzip")
        most = int(self.max_reply_mib * 2**20)
        unpacker = zlib.decompressobj(_GZIP_WINDOW) if encoding in _GZIP else None
        body = bytearray()
        try:
            async for chunk in response.aiter_raw():
                body += chunk if unpacker is None else unpacker.decompress(chunk, most + 1 - len(body))
                if len(body) > most:
                    limit = f"{self.max_reply_mib:g} MiB (RemoteJudge.max_reply_mib)"
                    raise UserError(f"{self.url} answered more than {limit}")
                if unpacker is not None and unpacker.unused_data:  # It would be kept without a limit.
                    raise UserError(f"{self.url} answered with damaged {encoding} (more follows its end)")
        except zlib.error as error:
            raise UserError(f"{self.url} answered with damaged {encoding} ({error})") from error
        if unpacker is not None and not unpacker.eof:
            raise UserError(f"{self.url} answered with damaged {encoding} (it has no end)")
        return bytes(body)

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


def score_in_reply(
    reply: str, *, pattern: str | None, scale: float, lowest: float, who: str, fields: str
) -> float:
    """Return the score in a chat model's reply, see `RemoteJudge.score_in`. Raises UserError, which says that
    `who` has answered so, and names settings as those of the class `fields`."""
    answered = f"{who} answered {_short(reply)}"
    number, named_scale = _found(after_thinking(reply), pattern, f"{fields}.pattern")
    try:
        score = float(number or "")
    except ValueError as error:
        finder = "there is" if pattern is None else "the pattern finds"
        raise UserError(f"{answered}, in which {finder} no score") from error
    if named_scale is not None and float(named_scale) != scale:
        raise UserError(f"{answered}, on another scale than {fields}.scale, {scale:g}")
    if not lowest <= score <= scale:
        legal = f"from {fields}.lowest, {lowest:g}, to {fields}.scale, {scale:g}"
        raise UserError(f"{answered}: the score {score:g} is out of range, which is {legal}")
    return score


def _found(text: str, pattern: str | None, setting: str) -> tuple[str | None, str | None]:
    """Return the texts of the score and of the scale that the reply names, if there are any."""
    if pattern is not None:
        return UserPattern(pattern, setting).last(text), None
    matches = list(_LABELLED.finditer(text))[-1:]
    for rule in (_ALONE, _SCALED):
        matches = matches or list(rule.finditer(text))
    return (matches[0]["score"], matches[0]["scale"]) if len(matches) == 1 else (None, None)


def _retry_after(value: str | None) -> float:
    """Return the seconds that a header `Retry-After` asks to wait: a number of them, or a date."""
    if value is None:
        return 0.0
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError, OSError):
        return 0.0


def _groups(pattern: str) -> int:
    try:
        return UserPattern(pattern, "RemoteJudge.pattern").num_groups
    except ValueError:
        return 0


def prompt_text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{message.get('role')}: {message.get('content')}" for message in prompt)


def _short(value: Any) -> str:
    try:
        return repr(value)[:200]
    except RecursionError:
        return "what is nested too deeply"
