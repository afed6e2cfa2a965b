"""Rewards that models give, as roles beside reward functions: outcome, process and generative reward models.

Each reward model is a role of its own, with a layout of its own in the plan. Its calls end with the column
`reward_<name>_score`, and the call `reward_forward` adds up the weighted values of models and functions.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from realhf.calls import Generate, HostFunction, SamplingConfig, Scores, Values
from realhf.errors import UserError
from realhf.experiment import Role
from realhf.graph import FunctionCall
from realhf.rewards.answers import UserPattern
from realhf.rewards.limits import RewardLimits
from realhf.rewards.remote_judge import prompt_text, score_in_reply
from realhf.rewards.reward import RewardFunctions, column_key, require_labels
from realhf.rewards.scoring import RewardCall, decode_responses
from realhf.user_input.field_types import check_types, require

if TYPE_CHECKING:
    from realhf.data.batch import Batch

_SEQUENCE = ("sequence_ids", "response_mask")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


@dataclass(frozen=True)
class ModelReward:
    """An outcome reward model beside other rewards: its score head at the last token of the response."""

    role: Role  # The frozen model; `head="score"`.
    weight: float = 1.0  # The score of a sample is the sum of weight times value over all rewards.
    name: str = "model"
    """The reward is logged as `reward/<name>/mean`, and its role and calls are `reward_<name>...`."""
    probability: bool = False  # Whether the value is the sigmoid of the score head's number.
    head: ClassVar[str] = "score"

    def __post_init__(self) -> None:
        kind = type(self).__name__
        check_types(self, f"{kind}.")
        require(math.isfinite(self.weight), f"{kind}.weight", self.weight, "be a finite number")
        require(
            _NAME.fullmatch(self.name) is not None, f"{kind}.name", repr(self.name),
            "have letters, digits and _ and begin with a letter, as calls are named so")
        require(
            self.role.head == self.head, f"{kind}.role", self.role.model,
            f"have head {self.head} for a {kind}, and it has {self.role.head}")
        require(
            self.role.optimizer is None, f"{kind}.role", self.role.model,
            "be frozen: set its optimizer to None")

    @property
    def role_name(self) -> str:
        return f"reward_{self.name}"

    @property
    def key(self) -> str:
        """The key of the column with the values of samples."""
        return f"{self.role_name}_score"

    def calls(self, *, tokenizer: str) -> tuple[FunctionCall, ...]:
        """Return the calls that write `key`."""
        return (FunctionCall(
            f"{self.role_name}_forward", inputs=_SEQUENCE[:1], outputs=(self.key,), role=self.role_name,
            work=Scores(self.probability)),)


@dataclass(frozen=True)
class ProcessReward(ModelReward):
    """A process reward model: the sigmoid of its score head at the end of each step of the response.

    Steps end with `step_end`, and the last one with the response. `reduce` makes one value of them
    (Lightman et al. 2023, arXiv:2305.20050: the product; Math-Shepherd, arXiv:2312.08935: the minimum).
    """

    name: str = "process"
    step_end: str = "\n\n"
    reduce: Literal["min", "mean", "last", "product"] = "min"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.step_end), "ProcessReward.step_end", repr(self.step_end), "be a text")
        require(
            not self.probability, "ProcessReward.probability", self.probability,
            "be false: the values of steps always are probabilities")

    def calls(self, *, tokenizer: str) -> tuple[FunctionCall, ...]:
        name = self.role_name
        ids, values = f"{name}_ids", f"{name}_values"
        return (
            FunctionCall(f"{name}_sequences", inputs=_SEQUENCE[:1], outputs=(ids,),
                         work=HostFunction(OneTokenMore(ids), splittable=True)),
            FunctionCall(f"{name}_forward", inputs=(ids,), outputs=(values,), role=name, work=Values()),
            FunctionCall(f"{name}_steps", inputs=(*_SEQUENCE, values), outputs=(self.key,),
                         work=HostFunction(StepScores(values, self.key, self.step_end, self.reduce),
                                           splittable=True)))


@dataclass(frozen=True)
class OneTokenMore:
    """A host function that repeats the last token of each sequence: the value of a token is that of the state
    before it, so the one more has the value of the state after the last one."""

    key: str

    def __call__(self, batch: Batch, context: Any) -> dict[str, Any]:
        tokens = batch[_SEQUENCE[0]]
        longer = [ids.new_tensor([*ids.tolist(), int(ids[-1])]) for ids in tokens.split()]
        return {self.key: type(tokens).of(longer, empty=tokens.values[:0])}


@dataclass(frozen=True)
class StepScores:
    """A host function that makes one value of the probabilities at the ends of a response's steps."""

    values: str  # Key of the values of the sequences with one token more.
    key: str
    step_end: str
    reduce: str

    def __call__(self, batch: Batch, context: Any) -> dict[str, Any]:
        mask = batch[_SEQUENCE[1]]
        columns = (batch[_SEQUENCE[0]].split(), mask.like(mask.in_response()).split(),
                   batch[self.values].split())
        reduced = []
        for ids, in_response, values in zip(*columns, strict=True):
            positions = in_response.nonzero().flatten().tolist()
            ends = self._ends([int(ids[i]) for i in positions], context.tokenizer)
            steps = [float(values[positions[end] + 1].double().sigmoid()) for end in ends]
            reduced.append(self._reduced(steps))
        return {self.key: mask.values.double().new_tensor(reduced)}

    def _ends(self, ids: Sequence[int], tokenizer: Any) -> list[int]:
        """Return the places of the tokens with which steps end; the last token is one of them."""
        ends = []
        text = ""
        for place, token in enumerate(ids):
            text += tokenizer.decode([token])
            if self.step_end in text:
                ends.append(place)
                text = ""
        return ends if ends[-1:] == [len(ids) - 1] else [*ends, len(ids) - 1]

    def _reduced(self, steps: Sequence[float]) -> float:
        if self.reduce == "min":
            return min(steps)
        if self.reduce == "mean":
            return math.fsum(steps) / len(steps)
        return steps[-1] if self.reduce == "last" else math.prod(steps)


_JUDGE_PROMPT = (
    "Here is a question and an answer to it.\n\nQuestion: {prompt}\n\nAnswer: {completion}\n\nHow good is "
    "the answer, from 0 (wrong) to 10 (right and clear)? Reply with one line: Score: NUMBER")


@dataclass(frozen=True)
class GenerativeReward(ModelReward):
    """A generative reward model: a language model that is asked for a score of each response.

    Its reply is read as that of a `RemoteJudge`. A reply without a legal score is a failure of the reward.
    """

    name: str = "judge"
    prompt: str = _JUDGE_PROMPT
    """The question, with the fields {prompt}, {completion} and those of `columns`. It is a user's message of
    a chat if the tokenizer has a chat template, else plain text."""
    columns: tuple[str, ...] = ()  # Columns of the dataset that the question shows.
    sampling: SamplingConfig = field(
        default_factory=lambda: SamplingConfig(max_new_tokens=256, temperature=0.0))
    pattern: str | None = None
    """A regular expression for the score in a reply: the first group of its last match; None: the number
    behind `score:`, or as with a RemoteJudge."""
    scale: float = 10.0  # The highest score that the model may give; scores are divided by it.
    lowest: float = 0.0  # The lowest score that the model may give.
    head: ClassVar[str] = "lm"

    def __post_init__(self) -> None:
        super().__post_init__()
        shows = "{completion}" in self.prompt
        require(shows, "GenerativeReward.prompt", repr(self.prompt), "have the field {completion}")
        require(self.scale > 0, "GenerativeReward.scale", self.scale, "be above 0")
        rule = f"be below the scale, {self.scale:g}"
        require(self.lowest < self.scale, "GenerativeReward.lowest", self.lowest, rule)
        if self.pattern is not None:
            groups = UserPattern(self.pattern, "GenerativeReward.pattern").num_groups
            require(
                groups >= 1, "GenerativeReward.pattern", self.pattern, "be a regular expression with a group")

    def calls(self, *, tokenizer: str) -> tuple[FunctionCall, ...]:
        name = self.role_name
        asked = f"{name}_prompt_ids"
        reply = tuple(f"{name}_{key}" for key in ("ids", "mask", "logprobs", "finished"))
        work = Generate(sampling=self.sampling, tokenizer=tokenizer if self.sampling.reads_text else None)
        inputs = (*_SEQUENCE, "prompt", *map(column_key, self.columns))
        return (
            FunctionCall(f"{name}_prompts", inputs=inputs, outputs=(asked,),
                         work=HostFunction(JudgePrompts(self, asked), splittable=True)),
            FunctionCall(f"{name}_generate", inputs=(asked,), outputs=reply, role=name, work=work),
            FunctionCall(f"{name}_read", inputs=reply[:2], outputs=(self.key,),
                         work=HostFunction(ReadScores(self, reply[:2]), splittable=True)))

    def question(self, shown: Mapping[str, str]) -> str:
        """Return the question with the values of its fields."""
        return re.sub(r"\{(\w+)\}", lambda found: shown.get(found[1], found[0]), self.prompt)

    def score_in(self, reply: str) -> float:
        """Return the value that a reply gives; NaN if there is no legal score in it."""
        try:
            score = score_in_reply(
                reply, pattern=self.pattern, scale=self.scale, lowest=self.lowest, who=self.name,
                fields="GenerativeReward")
        except UserError:
            return math.nan
        return score / self.scale


@dataclass(frozen=True)
class JudgePrompts:
    """A host function that makes the questions for a generative reward model."""

    reward: GenerativeReward
    key: str

    def __call__(self, batch: Batch, context: Any) -> dict[str, Any]:
        _, completions = decode_responses(batch, context)
        tokens = batch[_SEQUENCE[0]]
        questions = []
        for i, completion in enumerate(completions):
            shown = {name: str(batch[column_key(name)][i]) for name in self.reward.columns}
            shown |= {"prompt": prompt_text(batch["prompt"][i]), "completion": completion}
            text = self.reward.question(shown)
            questions.append(tokens.values.new_tensor(self._ids(text, context.tokenizer)))
        return {self.key: type(tokens).of(questions, empty=tokens.values[:0])}

    def _ids(self, text: str, tokenizer: Any) -> list[int]:
        if getattr(tokenizer, "chat_template", None) is None:
            return list(tokenizer.encode(text))
        chat = [{"role": "user", "content": text}]
        written = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return list(tokenizer.encode(written, add_special_tokens=False))


@dataclass(frozen=True)
class ReadScores:
    """A host function that reads the scores in the replies of a generative reward model."""

    reward: GenerativeReward
    reply: tuple[str, ...]  # Keys of the replies' tokens and masks.

    def __call__(self, batch: Batch, context: Any) -> tuple[dict[str, Any], dict[str, float]]:
        _, replies = decode_responses(batch, context, sequence=(self.reply[0], self.reply[1]))
        scores = [self.reward.score_in(reply) for reply in replies]
        num_failed = sum(map(math.isnan, scores))
        metrics = {f"reward/{self.reward.name}/failed": num_failed / len(scores)} if num_failed else {}
        return {self.reward.key: batch[self.reply[1]].values.double().new_tensor(scores)}, metrics


class JoinedRewards(RewardCall):
    """A host function that adds up the weighted values of reward functions, if there are any, and models."""

    def __init__(
        self, functions: RewardFunctions | None, models: Sequence[ModelReward], columns: Sequence[str],
        limits: RewardLimits,
    ) -> None:
        super().__init__(functions, columns, limits)
        self.models = tuple(models)
        require_labels([*(reward.label for reward in self.rewards), *(model.name for model in models)])

    @property
    def inputs(self) -> tuple[str, ...]:
        return (*super().inputs, *(model.key for model in self.models))

    def __call__(self, batch: Batch, context: Any) -> dict[str, Any]:
        columns = super().__call__(batch, context)
        for model in self.models:
            values = batch[model.key].to(columns["score"])
            if values.isnan().any() and self.limits.on_failure == "stop":
                sample = batch.ids[int(values.isnan().nonzero()[0])]
                raise UserError(
                    f"reward model {model.name} gave no score for {int(values.isnan().sum())} of "
                    f"{len(batch)} samples, first for sample {sample}; reward_limits.on_failure='drop' "
                    "leaves such samples out")
            columns["score"] = columns["score"] + model.weight * values
            pairs = zip(columns["reward_scores"], values.tolist(), strict=True)
            columns["reward_scores"] = [
                named | {model.name: None if math.isnan(value) else value} for named, value in pairs]
        return columns


def check_models(models: Sequence[ModelReward], *, max_lag: int) -> None:
    """Raise ValueError about reward models that do not go together, or with the experiment."""
    for name, count in Counter(model.name for model in models).items():
        require(
            count == 1, "reward_models.name", repr(name),
            f"differ, and {count} reward models are named so: give each a name of its own")
    generative = [model.name for model in models if isinstance(model, GenerativeReward)]
    require(
        max_lag == 0 or not generative, "max_lag", max_lag,
        f"be 0 with the generative reward model {generative[:1]}, whose replies are not made in rounds")
