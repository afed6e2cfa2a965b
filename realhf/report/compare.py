"""Where two runs part: settings that differ, the first differing step, call, sample and token, and why."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realhf.report.findings import number
from realhf.report.run_data import RunFiles
from realhf.runtime.compile.program import leaves
from realhf.runtime.records.digest_file import DATASET, DIGESTS, CallDigest, digest_of, read_digests

_HALF = ("bfloat16", "float16")
_TOLERANCES = {"bfloat16": 0.05, "float16": 0.02, "float32": 1e-3, "float64": 1e-6}
"""Relative differences of numbers that rounding may make under another plan, by the widest of the dtypes."""
_SAME_PLAN = 1e-6
"""The same where plan and versions are equal."""
_ROW = "dataset_row"
_UNTOLD = ("steps", "eval_every", "eval_at_start", "export_every", "checkpoint_every", "keep_checkpoints",
           "keep_checkpoint_every", "log_every", "expected", "rollouts")
"""Beginnings of settings that change no sample."""
_SAMPLING = ("sampling.", "max_rows", "group_size", "system_prompt", "chat")
_AROUND = 8
"""Tokens that are shown on each side of the first differing one."""
_MOST_SHOWN = 80


@dataclass(frozen=True)
class ChangedField:
    """A field that differs between two runs; None where a run does not have it."""

    name: str
    first: Any
    other: Any

    def __str__(self) -> str:
        return f"{self.name}: {shown(self.first)} and {shown(self.other)}"


@dataclass(frozen=True)
class ChangedFields:
    """All that differs before the first step: settings, plan, versions, rows, code, models, machine."""

    settings: Sequence[ChangedField]
    plan: Sequence[ChangedField]
    versions: Sequence[ChangedField]
    data: Sequence[ChangedField]
    code: Sequence[ChangedField]
    models: Sequence[ChangedField]
    machine: Sequence[ChangedField]

    def named(self) -> Iterator[tuple[str, ChangedField]]:
        for kind, found in vars(self).items():
            yield from ((kind, one) for one in found)


@dataclass(frozen=True)
class Token:
    """The first differing token of a sample; `around` are the tokens of each run from `start` on."""

    index: int
    first: int | None
    other: int | None
    start: int
    around: tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Parting:
    """The first difference of a kind: what a call has computed for a sample in a step."""

    step: int
    call: str
    column: str
    sample: int | None
    """None where samples were not kept, or are not the same ones."""
    num_samples: int
    """How many samples of the call differ in this column."""
    is_number: bool = False
    first: float | None = None
    other: float | None = None
    row: int | None = None
    """The row of the dataset, where it is known."""
    token: Token | None = None

    @property
    def sentence(self) -> str:
        where = f"step {self.step}, {'the rows of the dataset' if self.call == DATASET else self.call}"
        if self.sample is None:
            return f"{where}: column {self.column} differs; which samples is not recorded there"
        sample = f"sample {self.sample}" + (f" (row {self.row})" if self.row is not None else "")
        if self.is_number and self.first is not None and self.other is not None:
            what = f"{self.column} is {number(self.first)} and {number(self.other)}"
        elif self.token is not None:
            what = f"token {self.token.index} of {self.column} is {self.token.first} and {self.token.other}"
        else:
            what = f"{self.column} differs"
        more = f"; {self.num_samples} samples differ there" if self.num_samples > 1 else ""
        return f"{where}, {sample}: {what}{more}"


@dataclass(frozen=True)
class Cause:
    """The likely cause of a difference: its kind, such as `seed`, and a sentence."""

    kind: str
    sentence: str


@dataclass(frozen=True)
class RunComparison:
    """Two runs: what differs before, the first difference of all, and the first differing token."""

    differences: ChangedFields
    parting: Parting | None
    token: Parting | None
    cause: Cause
    compared_steps: int
    missing: str = ""
    """Why calls cannot be compared; empty if they can."""

    def document(self) -> dict[str, Any]:
        """Return the comparison as JSON."""
        named = {kind: [asdict(one) for one in found] for kind, found in vars(self.differences).items()}
        return {
            "differences": named, "compared_steps": self.compared_steps, "missing": self.missing,
            "parting": self.parting and asdict(self.parting), "token": self.token and asdict(self.token),
            "cause": asdict(self.cause)}


def compare(first: RunFiles, other: RunFiles) -> RunComparison:
    """Compare two runs."""
    differences = find_differences(first, other)
    paths = [run.path / DIGESTS for run in (first, other)]
    if lacking := [str(path.parent) for path in paths if not path.is_file()]:
        missing = f"{' and '.join(lacking)} has no {DIGESTS} (rollouts.digest_megabytes)"
        parting = _of_metrics(first, other)
        cause = _without_samples(differences, parting)
        return RunComparison(differences, parting, None, cause, _common_steps(first, other), missing)
    both = [read_digests(path) for path in paths]
    tolerance = _tolerance(first, other, differences)
    order = [DATASET, *(call["name"] for call in first.about.get("calls", []))]
    parting, token = _first_differences(both, order, tolerance)
    steps = len(both[0].keys() & both[1].keys())
    if parting is None:
        parting = _of_metrics(first, other, tolerance=max(tolerance, _TOLERANCES["float32"]))
    cause = likely_cause(first, other, differences, parting)
    return RunComparison(differences, parting, token, cause, steps)


# Before the first step


def find_differences(first: RunFiles, other: RunFiles) -> ChangedFields:
    """Return everything in which two runs were started differently."""
    runs = (first, other)
    settings = [
        one for one in _between(*(run.config for run in runs))
        if not one.name.startswith(("roles.", "hub."))]
    named = {one.name for one in settings}
    roles = [one for one in _between(*(run.config.get("roles", {}) for run in runs)) if one.name not in named]
    plans = [{} if run.plan is None else {
        name: {field: str(value) for field, value in vars(call).items() if field != "predicted"}
        for name, call in run.plan.calls.items()} for run in runs]
    sources = [run.about.get("sources", {}) for run in runs]
    data = [{name: {str(i): {key: value for key, value in file.items() if key != "file"}
                    for i, file in enumerate(files)}
             for name, files in run.about.get("data", {}).items()} for run in runs]
    code = [source.get("code", {}) for source in sources]
    # A process may have imported more than another, and what is new is used by what has changed.
    shared = {file: code[0][file].keys() & code[1][file].keys() for file in code[0].keys() & code[1].keys()}
    code = [{file: {name: of_run[file][name] for name in sorted(names)} for file, names in shared.items()}
            for of_run in code]
    machine = [{name: run.about.get(name) for name in ("num_ranks", "device", "cores")} for run in runs]
    return ChangedFields(
        settings=[*settings, *roles], plan=_between(*plans),
        versions=_between(*(run.about.get("versions", {}) for run in runs)), data=_between(*data),
        code=_between(*code),
        models=_between(*({name: str(files) for name, files in source.get("models", {}).items()}
                          for source in sources)),
        machine=_between(*machine))


def _between(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[ChangedField]:
    flat = [dict(leaves(fields)) for fields in (first, other)]
    names = dict.fromkeys((*flat[0], *flat[1]))
    return [ChangedField(name, flat[0].get(name), flat[1].get(name)) for name in names
            if flat[0].get(name) != flat[1].get(name)]


def shown(value: Any) -> str:
    """Return a value as a short text."""
    text = repr(value) if value is not None else "not set"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def dtypes(run: RunFiles) -> set[str]:
    """Return the dtypes of the weights of a run's roles."""
    roles = run.config.get("roles", {}).values()
    return {role.get("dtype") or "float32" for role in roles if isinstance(role, Mapping)}


def _tolerance(first: RunFiles, other: RunFiles, differences: ChangedFields) -> float:
    if not (differences.plan or differences.versions or differences.machine):
        return _SAME_PLAN
    return max(_TOLERANCES.get(dtype, _SAME_PLAN) for dtype in dtypes(first) | dtypes(other) | {"float64"})


# The first difference


def _first_differences(
    both: Sequence[dict[int, dict[str, list[dict[str, Any]]]]], order: Sequence[str], tolerance: float
) -> tuple[Parting | None, Parting | None]:
    """Return the first difference of all, and the first in tokens.

    A number counts from `tolerance` on. Calls that only one run has are left out.
    """
    parting: Parting | None = None
    for step in sorted(both[0].keys() & both[1].keys()):
        calls = both[0][step].keys() & both[1][step].keys()
        for call in sorted(calls, key=lambda name: order.index(name) if name in order else len(order)):
            if both[0][step][call] == both[1][step][call]:
                continue
            pair = [digest_of(digests[step][call]) for digests in both]
            for found in _of_call(step, call, pair[0], pair[1], tolerance):
                parting = parting or found
                if found.token is not None:
                    return parting, found
    return parting, None


def _of_call(
    step: int, call: str, first: CallDigest, other: CallDigest, tolerance: float
) -> Iterator[Parting]:
    """Yield the differences between what two runs have computed in a call; those of tokens come first."""
    kinds = {key: kind for key, kind in first.kinds.items() if other.kinds.get(key) == kind}
    ranks = {"tokens": 0, "numbers": 1, "exact": 2}  # A number says more than that something differs.
    if first.ids is None or other.ids is None:
        for key, kind in kinds.items():
            if kind != "numbers" and first.totals[key] != other.totals[key]:
                yield Parting(step, call, key, None, 0)
        return
    ids, places, places_other = np.intersect1d(first.ids, other.ids, return_indices=True)
    if len(ids) < max(len(first.ids), len(other.ids)):
        alone = sorted(set(first.ids) ^ set(other.ids))
        yield Parting(step, call, "samples", alone[0], len(alone))
    rows = _rows(first, places)
    for key in sorted(kinds, key=lambda key: (key != _ROW, ranks[kinds[key]])):
        if key not in first.values or key not in other.values:
            continue
        a, b = first.values[key][places], other.values[key][places_other]
        differs = np.flatnonzero(_differ(a, b, tolerance) if kinds[key] == "numbers" else a != b)
        if not len(differs):
            continue
        at = int(differs[0])
        found = Parting(
            step, call, key, int(ids[at]), len(differs), row=None if rows is None else int(rows[at]))
        if kinds[key] == "numbers":
            found = replace(found, is_number=True, first=float(a[at]), other=float(b[at]))
        if key == _ROW and (theirs := _rows(other, places_other)) is not None and rows is not None:
            found = replace(
                found, row=None, is_number=True, first=float(rows[at]), other=float(theirs[at]))
        elif key in first.tokens and key in other.tokens:
            found = replace(found, token=first_token(
                first.tokens[key][int(places[at])], other.tokens[key][int(places_other[at])]))
        yield found


def _rows(digest: CallDigest, places: NDArray[Any]) -> NDArray[Any] | None:
    """Return the rows of samples of the dataset, which are kept as tokens of one number."""
    if _ROW not in digest.tokens:
        return None
    return np.array([digest.tokens[_ROW][int(place)][0] for place in places])


def _differ(a: NDArray[Any], b: NDArray[Any], tolerance: float) -> NDArray[np.bool_]:
    scale = np.maximum(np.maximum(np.abs(a), np.abs(b)), 1e-3)
    return np.abs(a.astype(np.float64) - b) > tolerance * scale


def first_token(first: NDArray[Any], other: NDArray[Any]) -> Token | None:
    """Return the first differing token of a sample; None if the tokens are equal."""
    length = min(len(first), len(other))
    differs = np.flatnonzero(first[:length] != other[:length])
    if not len(differs) and len(first) == len(other):
        return None
    index = int(differs[0]) if len(differs) else length
    start = max(0, index - _AROUND)
    around = tuple(tuple(tokens[start : index + _AROUND + 1].tolist()) for tokens in (first, other))
    values = [int(tokens[index]) if index < len(tokens) else None for tokens in (first, other)]
    return Token(index, values[0], values[1], start, (around[0], around[1]))


_CLOCKED = ("timing_s/", "perf/", "bubble/", "compute/", "environment_wait_s/", "environment/seconds")


def _of_metrics(
    first: RunFiles, other: RunFiles, *, tolerance: float = _TOLERANCES["float32"]
) -> Parting | None:
    """Return the first step in which a metric differs that does not depend on the clock."""
    others = {record["step"]: record for record in other.records}
    for record in first.records:
        theirs = others.get(record["step"])
        if theirs is None:
            continue
        for name, value in record.items():
            if name.startswith(_CLOCKED) or name not in theirs or not isinstance(value, int | float):
                continue
            if abs(value - theirs[name]) > tolerance * max(abs(value), abs(theirs[name]), 1e-3):
                return Parting(
                    record["step"], "the metrics", name, None, 0, is_number=True, first=float(value),
                    other=float(theirs[name]))
    return None


def _common_steps(first: RunFiles, other: RunFiles) -> int:
    return len({record["step"] for record in first.steps} & {record["step"] for record in other.steps})


# The cause


def likely_cause(
    first: RunFiles, other: RunFiles, differences: ChangedFields, parting: Parting | None
) -> Cause:
    """Return why two runs part, as far as what they have recorded tells."""
    if parting is None:
        return Cause("none", "The runs do not part in the steps that both have.")
    settings = [one for one in differences.settings if not one.name.startswith(_UNTOLD)]
    seed = [one for one in settings if one.name == "seed" or one.name.endswith(".seed")]
    if parting.call == DATASET:
        return _of_rows(differences, settings, seed, parting)
    kind = first.call(parting.call).get("kind")
    if kind == "host":
        return _of_reward(differences, settings, parting)
    if kind == "generate":
        return _of_tokens(first, other, differences, settings, seed, parting)
    return _otherwise(first, other, differences, settings)


def _of_rows(
    differences: ChangedFields, settings: Sequence[ChangedField], seed: Sequence[ChangedField],
    parting: Parting,
) -> Cause:
    files = [one for one in differences.data if one.name.startswith("dataset")]
    chosen = [one for one in settings if one.name.startswith(("dataset", "batch_size", "tokenizer"))]
    if parting.column in (_ROW, "samples") or not files:
        if seed:
            return Cause("seed", f"The seed: {seed[0]}. It orders the rows of the dataset, and draws tokens.")
        if chosen:
            return Cause("data", f"Which rows are read, and how: {_joined(chosen)}.")
    if files:
        row = f" Row {parting.row} is the first that differs." if parting.row is not None else ""
        return Cause("data", f"The files of the dataset hold other rows: {_joined(files)}.{row}")
    if seed:
        return Cause("seed", f"The seed: {seed[0]}.")
    if settings:
        return Cause("settings", f"The rows differ, and so do settings: {_joined(settings)}.")
    return Cause("data", "The rows differ, although the same files and settings were recorded.")


def _of_reward(differences: ChangedFields, settings: Sequence[ChangedField], parting: Parting) -> Cause:
    rewards = [one for one in settings if "reward" in one.name or "shaping" in one.name]
    before = "Rows and tokens before it are equal"
    if rewards:
        return Cause("reward", f"The reward: {_joined(rewards)}. {before}.")
    if differences.code:
        names = ", ".join(one.name for one in differences.code[:4])
        return Cause("reward", f"The code that scores has changed: {names}. {before}.")
    if settings:
        return Cause("settings", f"{before}, and {parting.call} differs with {_joined(settings)}.")
    if differences.versions:
        return Cause("version", f"{before}; versions differ: {_joined(differences.versions)}.")
    return Cause("reward", (
        f"{before}, and so is all that is recorded: {parting.call} does not give the same values twice, such "
        "as a judge, a clock or random numbers of its own."))


def _of_tokens(
    first: RunFiles, other: RunFiles, differences: ChangedFields, settings: Sequence[ChangedField],
    seed: Sequence[ChangedField], parting: Parting,
) -> Cause:
    if seed:
        return Cause("seed", f"The seed: {seed[0]}. Tokens are drawn with other numbers.")
    sampling = [one for one in settings if any(text in one.name for text in _SAMPLING)]
    is_first = parting.step <= 1
    if is_first and sampling:
        return Cause("settings", f"How tokens are drawn: {_joined(sampling)}.")
    if is_first and differences.models:
        return Cause("model", f"The files of a model hold other weights: {_joined(differences.models)}.")
    return _otherwise(first, other, differences, settings)


def _otherwise(
    first: RunFiles, other: RunFiles, differences: ChangedFields, settings: Sequence[ChangedField]
) -> Cause:
    """Return the cause of a difference that comes from weights or from rounding."""
    if settings:
        return Cause(
            "settings", f"Rows and rewards before it are equal, and settings differ: {_joined(settings)}.")
    if differences.code:
        names = ", ".join(one.name for one in differences.code[:4])
        return Cause("code", f"The experiment's code has changed: {names}.")
    if differences.models:
        return Cause("model", f"The files of a model hold other weights: {_joined(differences.models)}.")
    plans = [*differences.plan, *(one for one in differences.machine if one.name == "num_ranks")]
    narrow = sorted((dtypes(first) | dtypes(other)) & set(_HALF))
    if plans and narrow:
        return Cause("plan", (
            f"Another plan in {narrow[0]}: {_joined(plans)}. The algorithm is the same; rounding moved a "
            "boundary between two tokens."))
    if plans:
        return Cause("plan", (
            f"Another plan: {_joined(plans)}. Sums are added in another order, and a boundary between two "
            "tokens lay within the difference."))
    if differences.versions:
        return Cause("version", f"Versions differ: {_joined(differences.versions)}.")
    if differences.machine:
        return Cause("machine", f"The machines differ: {_joined(differences.machine)}.")
    deterministic = all(run.config.get("deterministic") for run in (first, other))
    more = "" if deterministic else "; `deterministic` makes kernels and collectives repeat bit for bit"
    return Cause("order", f"Nothing that is recorded differs: sums were added in another order{more}.")


def _without_samples(differences: ChangedFields, parting: Parting | None) -> Cause:
    if parting is None:
        return Cause("none", "No metric differs in the steps that both runs have.")
    named = [one for _, one in differences.named() if not one.name.startswith(_UNTOLD)]
    if named:
        return Cause("unknown", f"Samples cannot be compared. What differs: {_joined(named)}.")
    return Cause("unknown", "Samples cannot be compared, and nothing that is recorded differs.")


def _joined(found: Sequence[ChangedField]) -> str:
    more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
    return f"{'; '.join(map(str, found[:3]))}{more}"
