"""Rollouts with environments inside generation, against transformers on each transcript alone."""

import json
import os
import string
from itertools import combinations

import pytest
import torch
from transformers import Qwen2Tokenizer

from realhf.calls import Generate, LogProbs, SamplingConfig
from realhf.data.batch import Batch, Packed
from realhf.distributed.world import World
from realhf.engine.native import NativeEngine
from realhf.environments.protocol import Environment
from realhf.environments.rollouts import EnvironmentTurnSourceFactory, WorkerPool
from realhf.errors import UserError
from realhf.graph import FunctionCall
from realhf.inference.kv_cache import BlockTables
from realhf.inference.sampling import stream_seed, uniform
from realhf.inference.scheduler import Prompt, Scheduler
from realhf.layout import Layout, even_split
from realhf.models.kv_blocks import num_blocks
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec
from tests.engine.reference import plain_model
from tests.environments import players
from tests.families import MOE_CASES
from tests.inference.paged import PagedReference
from tests.inference.rounds import BLOCK_GIB, SIZES
from tests.samples import marked

END = 1
GROUP = 2
MAX_TOKENS = 160
NUM_SAMPLES = 8
SEED = 5
VERSION = 7
"""The version of weights that do not change."""
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


def _call(directory, environment=TALKS, pool=None, stop=(), **options):
    calls = EnvironmentTurnSourceFactory(environment, str(directory), {}, GROUP, pool or WorkerPool())
    work = Generate(
        SamplingConfig(max_new_tokens=12, stop=stop), seed=SEED, environment=calls,
        tokenizer=str(directory) if stop else None, **options)
    inputs = ("prompts", "prompt", "number")
    outputs = ("sequences", "mask", "logprobs", "finished", "versions", "rollout")
    return FunctionCall("gen", "generate", inputs, outputs, role="actor", work=work)


def _generate(world, text, directory, options, paged):
    """Generate on every rank of a layout; return on result ranks the columns of each sample."""
    layout = Layout.parse(text)
    if world.rank not in layout:
        return {}
    engine = _engine(world, layout, directory, paged)
    call = _call(directory, **options)
    made = engine.generate(call, _batch(_share(range(NUM_SAMPLES), layout, world)), version=VERSION).batch
    _check_computed(engine, _rows(call, made), options)
    return _rows(call, made)


def _engine(world, layout, directory, paged=False):
    config = EXPERTS if layout.ep > 1 or directory is None else ModelConfig.load(str(directory))
    engine = NativeEngine(
        model_spec(config), layout, world, dtype="float64", paged=PagedReference() if paged else None)
    engine.load(directory if config is not EXPERTS else None, seed=0)
    return engine


def _check_computed(engine, rows, options):
    """Check that each token of a transcript has been computed once, those of starts once for a group, and
    those that starts of one pass have in common perhaps once for all."""
    if not rows or options.get("kv_cache_gib") is not None or engine.groups.cp.size > 1:
        return
    starts, total = {}, 0
    for sample, (tokens, *_, document) in rows.items():
        start = json.loads(document)["turns"][0]["start"]
        starts[sample // GROUP] = list(tokens[:start])
        total += len(tokens) - start - 1  # The last token is not computed.
    total += sum(map(len, starts.values()))
    if engine.pages is None:
        common = [len(os.path.commonprefix(pair)) for pair in combinations(starts.values(), 2)]
        shared = max(common, default=0) * (len(starts) - 1)
        assert total - shared <= engine.last_num_computed <= total
    else:  # The next step begins before the last one has been read.
        assert total <= engine.last_num_computed <= 1.05 * (total + len(rows))


def _share(ids, layout, world, *, shift=0):
    """Return the part of some samples that a data shard gets; a shift gives each part to another shard."""
    part = (layout.coordinate(world.rank).dp + shift) % layout.dp
    return [*ids][slice(*even_split(len(ids), layout.dp, part))]


def _batch(ids):
    prompts = Packed.of([torch.tensor([5])] * len(ids), empty=torch.zeros(0, dtype=torch.long))
    return Batch(ids, {
        "prompts": prompts, "prompt": ["Q"] * len(ids), "number": [i // GROUP for i in ids]})


def _rows(call, made):
    if not made.fields:
        return {}
    columns = [made[key].split() for key in (*call.outputs[:3], "versions")]
    columns += [made["finished"].tolist(), made["rollout"]]
    return {
        i: (t.tolist(), m.tolist(), p.tolist(), v.tolist(), f, json.dumps(r))
        for i, t, m, p, v, f, r in zip(made.ids, *columns, strict=True)}


def _generate_in_rounds(world, text, directory, options, budget, moves, is_resumed):
    """Generate in rounds, each with other weights; return the rows, and how often environments have started.

    Unfinished samples come back to their ranks, or to others if each `moves`. If the run `is_resumed` before
    each round, no environment is left.
    """
    layout = Layout.parse(text)
    if world.rank not in layout:
        return {}, 0
    engine = _engine(world, layout, directory / "0")
    control = world.group(layout.ranks, purpose="control")
    rows, unfinished, pool, num_started = {}, None, WorkerPool(), 0
    ids = _share(range(NUM_SAMPLES), layout, world)
    number = 0
    while number < 2 or len(unfinished):
        engine.load(directory / str(number), seed=0)
        batch = _batch([i for i in ids if number < 2 and i // GROUP % 2 == number])
        if unfinished is not None:
            place = {i: at for at, i in enumerate(unfinished.ids)}
            mine = _share(sorted(unfinished.ids), layout, world, shift=number if moves else 0)
            unfinished = unfinished.select([place[i] for i in mine])
        if is_resumed and pool._workers is not None:
            num_started += pool._workers._num_started
            pool._workers.shutdown()
            pool = WorkerPool()
        call = _call(directory, pool=pool, **options)
        result = engine.generate(call, batch, unfinished=unfinished, budget=budget, version=number)
        rows |= _rows(call, result.batch)
        shared = [Batch.unpack(data) for data in control.all_gather_bytes(result.unfinished.pack())]
        unfinished = Batch.concat([part for part in shared if part.fields] or [Batch([])])
        number += 1
    return rows, num_started + (pool._workers._num_started if pool._workers is not None else 0)


def _check(directory, results, *, models=None, budget=None):
    """Compare each transcript with the template's text and with the model's distributions.

    In rounds, each sample draws `budget` tokens of every version, of which `models` are the models.
    """
    tokenizer = Qwen2Tokenizer.from_pretrained(directory)
    if models is None:
        models = {VERSION: plain_model(directory, eos_token_id=[END], **SIZES).eval()}
    rows = {i: row for result in results for i, row in result.items()}
    assert sorted(rows) == list(range(NUM_SAMPLES))
    stops = set()
    lengths = []
    for sample, (tokens, mask, logprobs, versions, finished, document) in rows.items():
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
        first_round = sample // GROUP % 2
        expected = [VERSION if budget is None else first_round + n // budget for n in range(len(sampled))]
        assert [versions[i] for i in sampled] == expected
        assert all(not version for i, version in enumerate(versions) if not mask[i])
        with torch.no_grad():
            logits = {v: models[v](torch.tensor([tokens])).logits[0].double() for v in set(expected)}
        first = len("Q" * [1, 64, 75][sample // GROUP % 3] + ":")
        assert spans[0][0] == first
        draws = uniform(
            stream_seed(SEED, "gen"), sample_ids=torch.full((len(sampled),), sample).numpy(),
            positions=torch.tensor(sampled).numpy() - first)
        for position, version, draw in zip(sampled, expected, draws, strict=True):
            probs = logits[version][position - 1].softmax(-1)
            assert tokens[position] == int((probs.cumsum(0) <= draw).sum())
            assert abs(logprobs[position] - probs[tokens[position]].log().item()) < 1e-9
        assert all(x == 0 for i, x in enumerate(logprobs) if not mask[i])
        rewards = [turn["rewards"] for turn in rollout["turns"]]
        assert [r["length"] for r in rewards] == [len(text) for text in said]
        assert ("stopped" in rewards[-1]) == (rollout["stop"] != "done")
        assert len(tokens) - first <= MAX_TOKENS
    expected = {"done", "max_turns"} | ({"max_tokens"} if budget is None else set())
    assert expected <= stops and max(lengths) > 2, (stops, lengths)


TIGHT = {
    "max_rows": 4, "kv_cache_gib": 8.01 * BLOCK_GIB,
    "environment": Environment(players.Ponders, max_turns=4, max_tokens=MAX_TOKENS)}
"""Blocks for little more than two whole rows, and environments for which many rows wait."""


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


def test_the_first_ratio_is_1_up_to_rounding(directory):
    """Generation and a pass over whole sequences differ by less than either does from float64."""
    engines = {}
    for dtype in ("float32", "float64"):
        engines[dtype] = NativeEngine(
            model_spec(ModelConfig.load(str(directory))), Layout.parse("d1@0"), World(), dtype=dtype)
        engines[dtype].load(directory, seed=0)
    call = FunctionCall(
        "pass", "forward", ("sequences", "mask"), ("logprobs",), role="actor", work=LogProbs())
    found = {}
    for dtype, engine in engines.items():
        made = engine.generate(_call(directory), _batch(range(NUM_SAMPLES))).batch
        sampled = made["mask"].values > 0
        passes = [
            of.forward(call, made.pick(("sequences", "mask")), micro_batch_tokens=10**6)["logprobs"].values
            for of in (engine, engines["float64"])]
        found[dtype] = [x.double()[sampled] for x in (made["logprobs"].values, *passes)]
    assert (found["float64"][0] - found["float64"][1]).abs().max() < 1e-12
    generated, passed, exact = found["float32"]
    errors = [(x - exact).square().mean().sqrt() for x in (generated, passed)]
    assert (generated - passed).square().mean().sqrt() < min(errors)
    assert (generated - passed).abs().max() < 2e-5, "log-probs down to -7, each of thousands of products"


EXPERTS = ModelConfig.from_hf(MOE_CASES["qwen2-moe"].hf(
    architectures=["Qwen2MoeForCausalLM"], eos_token_id=[END]) | {
        "num_hidden_layers": 2, "max_position_embeddings": 256, "vocab_size": 67})


@pytest.mark.parametrize(("layout", "options"), marked(
    [("e2@0-1", {}), ("e2@0-1", TIGHT), ("e2p2@0-3", {}), ("e2t2@0-3", {})], quick=[0]))
def test_shared_experts_change_no_turn(pool, directory, layout, options):
    """Ranks take part in the steps of others while all of their own rows wait."""
    alone = _generate_experts(World(), "d1@0", directory, options)
    rows = {
        i: row for result in pool.run(_generate_experts, layout, directory, options)
        for i, row in result.items()}
    assert rows.keys() == alone.keys()
    for sample, (tokens, mask, logprobs, versions, finished, document) in rows.items():
        theirs = alone[sample]
        assert (tokens, mask, versions, finished) == (theirs[0], theirs[1], theirs[3], theirs[4])
        assert logprobs == pytest.approx(theirs[2], abs=1e-9)
        assert json.loads(document)["messages"] == json.loads(theirs[5])["messages"]


def _generate_experts(world, text, directory, options):
    layout = Layout.parse(text)
    if world.rank not in layout:
        return {}
    engine = _engine(world, layout, None)
    call = _call(directory, **options)
    ids = _share(range(NUM_SAMPLES), layout, world)
    return _rows(call, engine.generate(call, _batch(ids), version=VERSION).batch)


def test_turns_end_at_stop_strings(directory):
    rows = _generate(World(), "d1@0", directory, {"stop": ("a", "b", "c", "d", "Zz")}, False)
    _check(directory, [rows])
    said = [
        message["content"].replace("<pad>", "")
        for *_, document in rows.values() for message in json.loads(document)["messages"]
        if message["role"] == "assistant"]
    assert sum(text[-1:] in "abcd" for text in said if text) > 1
    assert not any(set(text[:-1]) & set("abcd") for text in said)


@pytest.mark.parametrize("text", marked(["d1@0", "t2@0-1"], quick=[0]))
def test_deterministic_generations_repeat_bit_for_bit(pool, directory, text):
    """What is taken up together then depends on no timing."""
    options = {"deterministic": True, "work_stealing": False, "kv_cache_gib": 60 * BLOCK_GIB}
    results = [
        [row for row in pool.run(_generate, text, directory, options, False) if row] for _ in range(2)]
    _check(directory, results[0])
    strip = [[{i: row[:5] for i, row in rows.items()} for rows in result] for result in results]
    assert strip[0] == strip[1]


def test_late_starts_keep_nobody_waiting(directory):
    """The longest prompts come last, and need wider tables and more pages than were expected."""
    environment = Environment(players.StartsLate, max_turns=4, max_tokens=MAX_TOKENS)
    rows = _generate(World(), "d1@0", directory, {"environment": environment}, False)
    _check(directory, [rows])
    metrics = [json.loads(document)["metrics"] for *_, document in rows.values()]
    assert min(m["first"] for m in metrics) < max(m["started"] for m in metrics)


def test_few_isolated_processes_serve_many_rollouts(directory):
    """Each has a process of its own; others start when one is free. A prompt's samples start together."""
    environment = Environment(
        players.Talks, max_turns=4, max_tokens=MAX_TOKENS, isolated=True, workers=GROUP)
    _check(directory, [_generate(World(), "d1@0", directory, {"environment": environment}, False)])
    few = Environment(players.Talks, max_tokens=MAX_TOKENS, isolated=True, workers=GROUP - 1)
    with pytest.raises(UserError, match="must be None or at least 2, the samples of a prompt, "):
        _generate(World(), "d1@0", directory, {"environment": few}, False)


@pytest.mark.parametrize("on_failure", ["drop", "stop"])
def test_a_replay_that_differs_is_dropped_and_counted(directory, on_failure):
    """What an earlier round has recorded is falsified here, in three ways."""
    environment = Environment(players.Talks, max_turns=4, max_tokens=MAX_TOKENS, on_failure=on_failure)
    engine = _engine(World(), Layout.parse("d1@0"), directory)
    call = _call(directory, environment)
    first = engine.generate(call, _batch(range(NUM_SAMPLES)), budget=30)
    left = first.unfinished
    rollouts, sequences = left["rollout"], left["sequences"].split()
    told = [at for at, rollout in enumerate(rollouts) if len(rollout["turns"]) > 1][:4]
    assert len(told) == 4
    rollouts[told[0]]["turns"][0]["rewards"]["length"] += 1.0
    sequences[told[1]][rollouts[told[1]]["turns"][0]["stop"]] += 1
    sequences[told[2]][0] += 1
    call = _call(directory, environment)
    if on_failure == "stop":
        with pytest.raises(UserError, match="replay_differs: it was started again and told what the model "):
            engine.generate(call, _batch([]), unfinished=left, budget=1000)
        return
    made = engine.generate(call, _batch([]), unfinished=left, budget=1000).batch
    by_id = dict(zip(made.ids, made["rollout"], strict=True))
    falsified = [by_id[left.ids[at]] for at in told[:3]]
    assert [rollout["stop"] for rollout in falsified] == ["replay_differs"] * 3
    assert all(rollout["dropped"] for rollout in falsified)
    for rollout, word in zip(falsified, ("rewards", "answered", "answered"), strict=True):
        assert f"has {'given the ' * (word == 'rewards')}{word} " in rollout["sentence"]
    others = [rollout for i, rollout in by_id.items() if i not in [left.ids[at] for at in told[:3]]]
    assert all(r["stop"] != "replay_differs" and not r["dropped"] for r in others)
    tokens = dict(zip(made.ids, made["sequences"].split(), strict=True))
    assert all(torch.equal(tokens[left.ids[at]], sequences[at]) for at in told[:3])


@pytest.fixture(scope="module")
def versions(directory):
    """The models of as many versions as there are rounds, in folders of the directory."""
    models = {}
    for version in range(2 + MAX_TOKENS // 4):
        model = plain_model(directory / str(version), eos_token_id=[END], **SIZES)
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.02 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        model.save_pretrained(directory / str(version))
        models[version] = model.eval()
    return models


@pytest.mark.parametrize(("budget", "is_resumed"), marked(
    [(5, False), (5, True), (31, False), (31, True), (12, False), (12, True)], quick=[4, 5]))
def test_rounds_go_on_in_the_middle_of_a_rollout(directory, versions, budget, is_resumed):
    """Weights change in turns and between them. A run that is resumed tells its environments all again."""
    rows, num_started = _generate_in_rounds(World(), "d1@0", directory, {}, budget, False, is_resumed)
    _check(directory, [rows], models=versions, budget=budget)
    assert (num_started > NUM_SAMPLES) == is_resumed


@pytest.mark.parametrize(("layout", "options", "moves"), marked(
    [("d2@0-1", {}, True), ("d2@0-1", {}, False), ("p2@0-1", {}, False), ("t2@0-1", TIGHT, True),
     ("c2@0-1", {}, True)], quick=[0]))
def test_layouts_change_no_round(pool, directory, versions, layout, options, moves):
    results = pool.run(_generate_in_rounds, layout, directory, options, 12, moves, False)
    _check(directory, [rows for rows, _ in results if rows], models=versions, budget=12)
    num_started = sum(count for _, count in results)
    assert num_started > NUM_SAMPLES if moves and layout == "d2@0-1" else num_started >= NUM_SAMPLES


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


def steps_of_turns(
    *, group, num_rows, num_slots, room, delay, start=10, turn=12, observed=4, turns=4, block=8
):
    """Return the decode steps, and the prefilled tokens, in which rows take all of their turns.

    Rows come in groups, the cache has room for `room` whole ones, and an environment answers after `delay`
    steps.
    """
    whole = start + turns * (turn + observed)
    tables = BlockTables(
        num_slots=num_slots, num_blocks=room * num_blocks(whole, block), block_size=block,
        blocks_per_row=num_blocks(whole, block) + 1)
    made = {row: [] for row in range(num_rows * turns)}  # Each turn is a row of its own.
    before = {row: list(range(start)) for row in range(num_rows)}
    prompts = [Prompt(list(range(start)), [*range(at, at + group)]) for at in range(0, num_rows, group)]
    scheduler = Scheduler(
        prompts, tables=tables, prefill_tokens=8192, history=lambda row: before[row] + made[row],
        may_go_on=lambda row: True, takes_from_parked=True)
    answers = []
    steps = computed = 0
    while scheduler.parked or answers or not scheduler.is_idle:
        for _, row in [answer for answer in answers if answer[0] <= steps]:
            answers.remove((_, row))
            if row + num_rows >= len(made):
                scheduler.drop(row)
                continue
            before[row + num_rows] = before[row] + made[row] + [0] * observed
            scheduler.continue_parked(Prompt(before[row + num_rows], [row + num_rows]), row)
        steps += 1
        assert steps < 20_000
        if (step := scheduler.plan()) is None:
            continue
        tables.advance()
        computed += sum(chunk.stop - chunk.start for chunk in step.chunks)
        for row in step.rows:
            made[row].append(1)
        stopped = [len(made[row]) == turn for row in step.rows]
        scheduler.count(stopped)
        answers += [(steps + delay, row) for row, stops in zip(step.rows, stopped, strict=True) if stops]
    assert all(len(tokens) == turn for tokens in made.values())
    assert scheduler.blocks.num_free == scheduler.blocks.num_blocks
    return steps, computed


@pytest.mark.parametrize("delay", [1, 30])
@pytest.mark.parametrize("group", [4, 64])
def test_parked_rows_that_fill_the_cache_leave_no_slots_empty(group, delay):
    """Rows that go on take the blocks of others that wait, also where a group has more rows than slots.

    Decoding alone takes a step for each token of all slots. With enough memory nothing is computed again, and
    else at most the histories of all rows that go on.
    """
    many = {"group": group, "num_rows": 64, "num_slots": 16, "delay": delay}
    alone = 64 * 4 * 12 / 16
    plenty, once = steps_of_turns(room=64, **many)
    few, again = steps_of_turns(room=16, **many)
    assert plenty < 1.25 * alone and few < 1.25 * alone
    assert once == 64 // group * 10 + 64 * 3 * 5 and once < again < once + 64 * sum((22, 38, 54))
