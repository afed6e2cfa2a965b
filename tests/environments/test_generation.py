"""Rollouts with environments inside generation, against transformers on each transcript alone."""

import json
import string

import pytest
import torch
from transformers import Qwen2Tokenizer

from realhf.calls import Generate, SamplingConfig
from realhf.data.batch import Batch, Packed
from realhf.distributed.world import World
from realhf.engine.native import NativeEngine
from realhf.environments.protocol import Environment
from realhf.environments.rollouts import EnvironmentCalls
from realhf.errors import UserError
from realhf.graph import FunctionCall
from realhf.inference.sampling import stream_seed, uniform
from realhf.inference.scheduler import Scheduler
from realhf.layout import Layout, even_split
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec
from tests.engine.reference import plain_model
from tests.environments import players
from tests.inference.paged import PagedReference
from tests.inference.rounds import BLOCK_GIB, SIZES
from tests.samples import marked

END = 1
GROUP = 2
MAX_TOKENS = 160
NUM_SAMPLES = 8
SEED = 5
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<end>{% else %}{{ ':' }}{% endif %}"
    "{% endfor %}")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A model of 67 tokens, characters and two that are special, and its tokenizer."""
    path = tmp_path_factory.mktemp("turns")
    characters = ["<pad>", "<end>", *":+-", *string.ascii_letters, *string.digits]
    vocabulary = {token: i for i, token in enumerate(characters)}
    tokenizer = Qwen2Tokenizer(vocabulary, merges=[], pad_token="<pad>", eos_token="<end>", unk_token="<pad>")
    tokenizer.chat_template = TEMPLATE
    plain_model(path, eos_token_id=[END], **SIZES)
    tokenizer.save_pretrained(path)
    return path


TALKS = Environment(players.Talks, max_turns=4, max_tokens=MAX_TOKENS)


def _call(directory, environment=TALKS, **options):
    calls = EnvironmentCalls(environment, str(directory), {}, GROUP)
    work = Generate(SamplingConfig(max_new_tokens=12), seed=SEED, environment=calls, **options)
    inputs = ("prompts", "prompt", "number")
    outputs = ("sequences", "mask", "logprobs", "finished", "versions", "rollout")
    return FunctionCall("gen", "generate", inputs, outputs, role="actor", work=work)


def _generate(world, text, directory, options, paged):
    """Generate on every rank of a layout; return on result ranks the columns of each sample."""
    layout = Layout.parse(text)
    if world.rank not in layout:
        return {}
    config = ModelConfig.load(str(directory))
    engine = NativeEngine(
        model_spec(config), layout, world, dtype="float64", paged=PagedReference() if paged else None)
    engine.load(directory, seed=0)
    ids = list(range(*even_split(NUM_SAMPLES, layout.dp, layout.coordinate(world.rank).dp)))
    numbers = [i // GROUP for i in ids]
    prompts = Packed.of([torch.tensor([5])] * len(ids), empty=torch.zeros(0, dtype=torch.long))
    batch = Batch(ids, {"prompts": prompts, "prompt": ["Q"] * len(ids), "number": numbers})
    call = _call(directory, **options)
    made = engine.generate(call, batch, version=7).batch
    if not made.fields:
        return {}
    assert made["versions"].values.tolist() == (7 * made["mask"].values).long().tolist()
    columns = [made[key].split() for key in call.outputs[:3]] + [made["finished"].tolist(), made["rollout"]]
    rows = zip(*columns, strict=True)
    return {
        i: (t.tolist(), m.tolist(), p.tolist(), f, json.dumps(r))
        for i, (t, m, p, f, r) in zip(made.ids, rows, strict=True)}


def _check(directory, results):
    """Compare each transcript with the template's text and with the model's distributions."""
    tokenizer = Qwen2Tokenizer.from_pretrained(directory)
    model = plain_model(directory, eos_token_id=[END], **SIZES).eval()
    rows = {i: row for result in results for i, row in result.items()}
    assert sorted(rows) == list(range(NUM_SAMPLES))
    stops = set()
    lengths = []
    for sample, (tokens, mask, logprobs, finished, document) in rows.items():
        rollout = json.loads(document)
        stops.add(rollout["stop"])
        assert finished == (rollout["stop"] in ("done", "max_turns"))
        whole = tokenizer.apply_chat_template(rollout["messages"], tokenize=False)
        expected = tokenizer.encode(whole, add_special_tokens=False)
        assert expected[: len(tokens)] == tokens and expected[len(tokens) :] in ([], [END])
        spans = [(turn["start"], turn["stop"]) for turn in rollout["turns"]]
        lengths.append(len(spans))
        said = [m["content"] for m in rollout["messages"] if m["role"] == "assistant"]
        assert [tokenizer.decode(tokens[a:b]).removesuffix("<end>") for a, b in spans] == said
        sampled = [i for start, stop in spans for i in range(start, stop)]
        assert [i for i, is_sampled in enumerate(mask) if is_sampled] == sampled
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0].double()
        first = len("Q" * [1, 64, 75][sample // GROUP % 3] + ":")
        assert spans[0][0] == first
        draws = uniform(
            stream_seed(SEED, "gen"), sample_ids=torch.full((len(sampled),), sample).numpy(),
            positions=torch.tensor(sampled).numpy() - first)
        for position, draw in zip(sampled, draws, strict=True):
            probs = logits[position - 1].softmax(-1)
            assert tokens[position] == int((probs.cumsum(0) <= draw).sum())
            assert abs(logprobs[position] - probs[tokens[position]].log().item()) < 1e-9
        assert all(x == 0 for i, x in enumerate(logprobs) if not mask[i])
        rewards = [turn["rewards"] for turn in rollout["turns"]]
        assert [r["length"] for r in rewards] == [len(text) for text in said]
        assert ("stopped" in rewards[-1]) == (rollout["stop"] != "done")
        assert len(tokens) - first <= MAX_TOKENS
    assert {"done", "max_turns", "max_tokens"} <= stops and max(lengths) > 2, (stops, lengths)


TIGHT = {"max_rows": 4, "kv_cache_gib": 8.01 * BLOCK_GIB}
"""Blocks for little more than two whole rows."""


@pytest.mark.parametrize(("options", "paged"), marked(
    [({}, True), ({}, False), ({"max_rows": 3}, False), (TIGHT, False), (TIGHT, True)], quick=[1, 3]))
def test_turns_are_those_of_each_transcript_alone(directory, options, paged, monkeypatch):
    reclaim = Scheduler._reclaim_idle_blocks
    lost = []

    def counted(self, **arguments):
        parked = len(self.parked)
        reclaimed = reclaim(self, **arguments)
        lost.append(parked - len(self.parked))
        return reclaimed

    monkeypatch.setattr(Scheduler, "_reclaim_idle_blocks", counted)
    _check(directory, [_generate(World(), "d1@0", directory, options, paged)])
    assert (sum(lost) > 0) == (options is TIGHT), "parked rows give their pages up if there are few"


@pytest.mark.parametrize(("layout", "options", "paged"), marked(
    [("d2@0-1", {}, False), ("t2@0-1", TIGHT, False), ("p2@0-1", {}, False), ("c2@0-1", {}, False),
     ("t2@0-1", {}, True), ("p2@0-1", TIGHT, False), ("p2t2@0-3", {}, False)], quick=[0, 1, 2]))
def test_layouts_change_no_turn(pool, directory, layout, options, paged):
    _check(directory, [result for result in pool.run(_generate, layout, directory, options, paged) if result])


BROKEN = {
    "works": "done", "raises": "step_error", "hangs": "step_timeout", "is_killed": "worker_lost",
    "floods": "context_full", "is_nonsense": "step_error", "start": "step_error"}
"""How an environment breaks -> why its rollout ends."""


@pytest.mark.parametrize("on_failure", ["drop", "zero", "stop"])
def test_a_broken_environment_ends_its_own_rollout(directory, on_failure):
    environment = Environment(
        players.Breaks, max_turns=4, on_failure=on_failure, step_seconds=1.0, isolated=True)
    engine = NativeEngine(
        model_spec(ModelConfig.load(str(directory))), Layout.parse("d1@0"), World(), dtype="float64")
    engine.load(directory, seed=0)
    ids = list(range(len(BROKEN)))
    prompts = Packed.of([torch.tensor([5])] * len(ids), empty=torch.zeros(0, dtype=torch.long))
    batch = Batch(ids, {"prompts": prompts, "prompt": ["Q"] * len(ids), "number": list(BROKEN)})
    call = _call(directory, environment)
    if on_failure == "stop":
        with pytest.raises(UserError, match="the environment of sample [1-6] has ended with "):
            engine.generate(call, batch)
        return
    made = engine.generate(call, batch).batch
    assert made.ids == ids
    assert [rollout["stop"] for rollout in made["rollout"]] == list(BROKEN.values())
    failed = [stop not in ("done", "context_full") for stop in BROKEN.values()]
    assert [rollout["dropped"] for rollout in made["rollout"]] == [
        is_failed and on_failure == "drop" for is_failed in failed]
    assert [bool(rollout["sentence"]) for rollout in made["rollout"]] == failed
    rewards = [sum(sum(t["rewards"].values()) for t in r["turns"]) for r in made["rollout"]]
    assert rewards == [1.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.0]
    assert all(mask.sum() > 0 for mask in made["mask"].split())
