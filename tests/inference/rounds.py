"""Generation in rounds on any layout, and references that decode one row at a time."""

from dataclasses import dataclass, field

import torch
import transformers

from realhf.calls import Generate, SamplingConfig
from realhf.data.batch import Batch, Packed
from realhf.distributed.world import World
from realhf.engine.native import NativeEngine
from realhf.graph import FunctionCall
from realhf.inference.sampling import stream_seed, uniform
from realhf.inference.scheduler import Scheduler
from realhf.layout import Layout, even_split
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec
from tests.engine.reference import plain_model
from tests.families import MOE_CASES
from tests.inference.paged import PagedReference

OUTPUTS = ("sequences", "mask", "logprobs", "finished", "versions")
SEED = 3
SIZES = {"max_position_embeddings": 256, "num_hidden_layers": 2, "initializer_range": 0.4}
EOS = [3, 20]
BLOCK_GIB = 2 * 2 * 64 * 2 * 8 * 8 / 2**30
"""Size of a block of the dense model: layers * keys and values * tokens * heads * dims * bytes."""


@dataclass(frozen=True)
class Case:
    """What is generated, how, and in which rounds."""

    batches: list  # Prompts that arrive in each round; ids count up over all of them.
    budgets: list  # Tokens of each round, the last repeatedly; None: all that are left.
    max_new: int
    options: dict = field(default_factory=dict)  # Fields of Generate.
    model: str | None = None  # Directory of version v, with "{}" for v; None: random experts.
    changes: bool = False  # Whether round r has the weights of version r, instead of version 0.
    sampling: dict = field(default_factory=dict)  # Fields of SamplingConfig.
    limits: dict = field(default_factory=dict)  # Sample id -> its own limit; empty: there is no such input.
    paged: bool = False  # Whether the engine generates by the paged path.

    @property
    def call(self):
        sampling = SamplingConfig(max_new_tokens=self.max_new, **self.sampling)
        work = Generate(sampling, **{"seed": SEED} | self.options)
        inputs = ("prompts", "limits") if self.limits else ("prompts",)
        return FunctionCall("gen", "generate", inputs, OUTPUTS, role="actor", work=work)

    def ids(self, number):
        """Return the ids of the samples that arrive in a round."""
        if number >= len(self.batches):
            return []
        first = sum(map(len, self.batches[:number]))
        return list(range(first, first + len(self.batches[number])))

    def budget(self, number):
        return self.budgets[min(number, len(self.budgets) - 1)]

    def batch(self, number, chosen):
        """Return some of the samples that arrive in a round."""
        first = min(self.ids(number), default=0)
        prompts = [torch.tensor(self.batches[number][i - first]) for i in chosen]
        fields = {"prompts": Packed.of(prompts, empty=torch.zeros(0, dtype=torch.long))}
        limits = {"limits": [self.limits.get(i, 1000) for i in chosen]} if self.limits else {}
        return Batch(list(chosen), fields | limits)


def write_versions(directory, count):
    """Write models of versions 0, 1, ...; return the models, and the pattern of their directories."""
    models = []
    for version in range(count):
        model = plain_model(directory / str(version), eos_token_id=EOS, **SIZES)
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for weight in model.parameters() if version else ():
                weight += 0.1 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        model.save_pretrained(directory / str(version))
        models.append(model.eval())
    return models, str(directory / "{}")


def make_engine(case, world, layout):
    if case.model is not None:
        config = ModelConfig.load(case.model.format(0))
    else:
        hf = MOE_CASES["qwen2-moe"].hf(architectures=["Qwen2MoeForCausalLM"], eos_token_id=[5, 11, 23])
        config = ModelConfig.from_hf(hf | {"num_hidden_layers": 2})
    paged = PagedReference() if case.paged else None
    engine = NativeEngine(model_spec(config), layout, world, dtype="float64", paged=paged)
    load_version(engine, case, 0)
    return engine


def load_version(engine, case, version):
    """Replace the weights, in place."""
    if case.model is not None:
        engine.load(case.model.format(version), seed=0)
    else:
        engine.load(None, seed=version)


def deal(ids, layout, dp, number):
    """Return the part of some samples that a data shard gets: all but the first shard get little."""
    if layout.dp == 1:
        return ids
    order = ids[number:] + ids[:number]
    num_first = max(len(ids) - 2 * (layout.dp - 1), -(-len(ids) // 2))
    if dp == 0:
        return order[:num_first]
    start, stop = even_split(len(ids) - num_first, layout.dp - 1, dp - 1)
    return order[num_first + start : num_first + stop]


def generate_in_rounds(world, text, case, *, engine=None, number=0):
    """Generate on every rank of a layout; return, on heads, rows by id, and everywhere the unfinished samples
    after each round.

    A row is (sequence, mask, log-probs, finished, versions). Unfinished samples are dealt anew every round.
    """
    layout = Layout.parse(text)
    if world.rank not in layout:
        return {}, []
    engine = engine or make_engine(case, world, layout)
    dp = layout.coordinate(world.rank).dp
    control = world.group(layout.ranks, purpose="control")
    rows, history, unfinished = {}, [], None
    while number == 0 or number < len(case.batches) or len(unfinished):
        if case.changes:
            load_version(engine, case, number)
        batch = case.batch(number, deal(case.ids(number), layout, dp, number))
        if unfinished is not None:
            place = {i: at for at, i in enumerate(unfinished.ids)}
            mine = deal(sorted(unfinished.ids), layout, dp, number)
            unfinished = unfinished.select([place[i] for i in mine])
        result = engine.generate(
            case.call, batch, unfinished=unfinished, budget=case.budget(number), version=number)
        rows |= rows_of(result.batch)
        shared = [Batch.unpack(data) for data in control.all_gather_bytes(result.unfinished.pack())]
        unfinished = Batch.concat([part for part in shared if part.fields] or [Batch([])])
        history.append(sorted(unfinished.ids))
        number += 1
    return rows, history


def rows_of(batch):
    """Return the rows of a batch by sample id."""
    if not batch.fields:
        return {}
    columns = [batch[key].split() for key in OUTPUTS[:3]]
    columns += [batch["finished"].tolist(), batch["versions"].split()]
    return dict(zip(batch.ids, zip(*columns, strict=True), strict=True))


def inserted_token(case, response):
    """Return the token of the phrase that follows a response, or None if the next token is sampled."""
    phrase = case.options.get("interruption")
    if phrase is None or not 0 <= len(response) - phrase.after_tokens < len(phrase.phrase):
        return None
    thinking = ",".join(map(str, [None, *response[: phrase.after_tokens], None]))
    has_ended = f",{','.join(map(str, phrase.end))}," in thinking
    return None if has_ended else phrase.phrase[len(response) - phrase.after_tokens]


_EXPECTED: dict = {}
"""The rows that `expected_rows` has computed, by all that they depend on."""


def expected_rows(case, models, *, keep, flushed=(), reference=None):
    """Decode one row at a time: {id: (sequence, log-probs of the response's tokens, their versions)}.

    The log-probs and versions of inserted tokens are 0.

    Version v of the weights is models[v], and round r has version r. Without `keep`, the whole history is
    computed for each token. With it, keys and values stay in a cache when a round ends, except at the
    beginning of the rounds in `flushed`. A `reference` (see sampling_reference) says which tokens are drawn
    and where responses end.
    """
    settings = (case.model, case.changes, case.batches, case.budgets, case.max_new)
    key = repr((settings, case.options.get("interruption"), keep, list(flushed)))
    if reference is not None:
        return _decode_alone(case, models, keep, flushed, reference)
    if key not in _EXPECTED:
        _EXPECTED[key] = _decode_alone(case, models, keep, flushed, None)
    return _EXPECTED[key]


def _decode_alone(case, models, keep, flushed, reference):
    numbers = stream_seed(SEED, "gen")
    rows = {}
    for first in range(len(case.batches)):
        for i, prompt in zip(case.ids(first), case.batches[first], strict=True):
            tokens, logprobs, versions = list(prompt), [], []
            number, left, cache = first, case.budget(first), transformers.DynamicCache()
            most = case.max_new if reference is None else reference.limit(i, case.max_new)
            while len(logprobs) < most and not _has_finished(tokens[len(prompt) :], reference):
                if left == 0:
                    number += 1
                    left = case.budget(number)
                    if number in flushed:
                        cache = transformers.DynamicCache()
                if not keep:
                    cache = transformers.DynamicCache()
                fresh = torch.tensor([tokens[cache.get_seq_length() :]])
                with torch.no_grad():
                    model = models[number if case.changes else 0]
                    logits = model(fresh, past_key_values=cache, use_cache=True).logits[0, -1]
                logp = (logits / ((reference and reference.temperature) or 1.0)).log_softmax(-1)
                position = torch.tensor([len(logprobs)]).numpy()
                draw = uniform(numbers, sample_ids=torch.tensor([i]).numpy(), positions=position)[0]
                if reference is None:
                    token = int((logp.exp().cumsum(0) <= draw).sum())
                else:
                    token = reference.token(tokens, len(prompt), logits, draw)
                inserted = inserted_token(case, tokens[len(prompt) :])
                tokens.append(token if inserted is None else inserted)
                logprobs.append(float(logp[token]) if inserted is None else 0.0)
                versions.append(number if inserted is None else 0)
                left -= 1
            rows[i] = tokens, logprobs, versions
    return rows


def _has_finished(response, reference):
    if reference is not None:
        return reference.has_finished(response)
    return bool(response) and response[-1] in EOS


def check_rows(found, expected, case, *, reference=None, rtol=1e-8):
    """Check rows of the engine against `expected_rows`."""
    assert found.keys() == expected.keys()
    prompts = dict(enumerate(prompt for batch in case.batches for prompt in batch))
    for i, (tokens, logprobs, versions) in expected.items():
        sequence, mask, found_logprobs, finished, found_versions = found[i]
        zeros = [0] * len(prompts[i])
        assert sequence.tolist() == tokens, i
        assert mask.tolist() == zeros + [int(logprob != 0) for logprob in logprobs]
        assert found_versions.tolist() == zeros + versions
        assert bool(finished) == _has_finished(tokens[len(prompts[i]) :], reference)
        theirs = torch.tensor(zeros + logprobs, dtype=torch.float64)
        torch.testing.assert_close(found_logprobs, theirs, rtol=rtol, atol=rtol / 10)


def prompts_of(seed, lengths):
    """Return random prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(21, 67, (n,), generator=generator).tolist() for n in lengths]


def alone(case, **options):
    """Generate in this process."""
    return generate_in_rounds(World(), "d1@0", case, **options)


def count_restarts(monkeypatch):
    """Return a list that grows by a row whenever a scheduler computes one again."""
    restarted = []
    restart = Scheduler._restart

    def record(self, row, **options):
        restarted.append(row)
        return restart(self, row, **options)

    monkeypatch.setattr(Scheduler, "_restart", record)
    return restarted
