"""Every family under every layout against transformers' own class: logits, gradients, greedy generation, and
the way back to a directory. The table is tests/families.py; `pytest -m ""` tests all of it."""

from functools import lru_cache
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from realhf.calls import Generate, SamplingConfig
from realhf.checkpoint.hf import save_weights
from realhf.data.batch import Batch, Packed
from realhf.distributed.world import World
from realhf.engine.native import NativeEngine
from realhf.engine.pipeline import forward_passes
from realhf.graph import FunctionCall
from realhf.layout import Layout, ParallelStrategy, even_split
from realhf.models.families import FAMILIES
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec, region_slices
from tests.families import CASES, LAYOUTS, MOE_CASES, MOE_LAYOUTS, QUICK, SIZES

ALL = {**CASES, **MOE_CASES}
LENGTHS = [5, 1, 9, 9, 3, 7]
PROMPT_LENGTHS = [8, 8, 56, 56]
MESHES = {1: "0", 2: "0,1", 4: "0-3"}
"""The ranks of a layout of so many."""


def _tokens(count):
    """No 0: transformers gives the padding token no gradient."""
    return torch.randint(1, SIZES["vocab_size"], (count,), generator=torch.Generator().manual_seed(1))


def _logit_weights():
    """The loss is the sum of the logits times these."""
    shape = (sum(LENGTHS), SIZES["vocab_size"])
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def _num_new(name):
    """Return how many tokens to generate: with Phi-3, the short prompts pass the length at which it changes
    its rope."""
    return 64 if name.startswith("phi-3") else 16


def _prompts():
    return list(_tokens(sum(PROMPT_LENGTHS)).split(PROMPT_LENGTHS))


def _share(layout, rank):
    """Indices of the sequences of a rank's dp shard."""
    return range(*even_split(len(LENGTHS), layout.dp, layout.coordinate(rank).dp))


def _logits_and_gradients(engine, layout, rank):
    """[(first token, first vocabulary entry, logits)], {name: (region, gradient)}."""
    model, share = engine.model, _share(layout, rank)
    starts = [sum(LENGTHS[:i]) for i in share]
    lengths = [LENGTHS[i] for i in share]
    ids = _tokens(sum(LENGTHS))[starts[0] : starts[0] + sum(lengths)]
    first, last = even_split(len(ids), layout.strategy.cp, layout.coordinate(rank).cp)
    found = []
    model.enable_grad()
    shape = (last - first, model.config.hidden_size)
    outputs = {}
    for i, hidden in forward_passes(model.groups, outputs, hidden_shapes=[shape], dtype=model.flat.dtype):
        outputs[i] = model(ids if hidden is None else hidden, lengths)
        if model.groups.is_last_stage:
            logits = model.logits(outputs[i])
            rows = slice(starts[0] + first, starts[0] + last)
            found.append((rows.start, model.vocab_range[0], logits.detach()))
            outputs[i] = (logits * _logit_weights()[rows, slice(*model.vocab_range)]).sum()
    model.finish_grads()
    grads = model.grad_shards()
    return found, {name: (region, grads[name]) for name, region in model.regions.items()}


def _generate(engine, layout, rank, num_new):
    prompts = _prompts()
    share = list(range(*even_split(len(prompts), layout.dp, layout.coordinate(rank).dp)))
    call = FunctionCall(
        name="actor_generate", kind="generate", role="actor", inputs=("prompt_ids",),
        outputs=("ids", "mask", "logprobs", "end"),
        work=Generate(SamplingConfig(max_new_tokens=num_new, temperature=0)),
    )
    batch = Batch(share, {"prompt_ids": Packed.of([prompts[i] for i in share])})
    result = engine.generate(call, batch).batch
    if rank not in layout.result_ranks:
        return {}
    return {i: row.tolist() for i, row in zip(share, result["ids"].split(), strict=True)}


def _on_rank(world, directory, text, target, num_new):
    layout = Layout.parse(text)
    if world.rank not in layout:
        return None
    spec = model_spec(ModelConfig.load(directory))
    engine = NativeEngine(spec, layout, world, dtype="float32")
    engine.load(Path(directory), seed=0)
    save_weights(target, engine.model)
    generated = _generate(engine, layout, world.rank, num_new)
    return *_logits_and_gradients(engine, layout, world.rank), generated


def _choice_biases(model):
    """What DeepSeek's routers add to scores when they choose experts: buffers, which are not trained."""
    return [value for key, value in model.named_buffers() if key.endswith("e_score_correction_bias")]


@lru_cache(maxsize=1)
def _reference(name, directory):
    """By transformers: logits, gradients by name in the checkpoint, and greedy continuations."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**ALL[name].hf())
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for value in (*(p for p in model.parameters() if p.dim() == 1), *_choice_biases(model)):
            value.add_(torch.randn_like(value) * 0.2)  # Norms and biases start as ones and zeros.
    model.save_pretrained(directory)
    logits = torch.cat([model(part[None]).logits[0] for part in _tokens(sum(LENGTHS)).split(LENGTHS)])
    (logits * _logit_weights()).sum().backward()
    # Gradients in the place of weights: save_pretrained knows their names in the checkpoint.
    with torch.no_grad():
        for value in model.parameters():
            value.data = torch.zeros_like(value) if value.grad is None else value.grad.clone()
    model.save_pretrained(directory / "gradients")
    load, tokens = transformers.AutoModelForCausalLM.from_pretrained, []
    for prompts in (torch.stack(_prompts()[:2]), torch.stack(_prompts()[2:])):
        fresh = load(directory, attn_implementation="eager")  # A dynamic rope remembers the longest so far.
        mask = torch.ones_like(prompts)
        made = fresh.generate(prompts, attention_mask=mask, do_sample=False, max_new_tokens=_num_new(name))
        tokens += made.tolist()
    return logits.detach(), load_file(directory / "gradients" / "model.safetensors"), tokens


ONE_OF_EACH = {case.family: name for name, case in reversed(ALL.items())}


@pytest.mark.parametrize("family", FAMILIES)
def test_classes_are_those_of_transformers(family):
    """A family has no class for scores only where transformers has none."""
    described = FAMILIES[family]
    assert hasattr(transformers, described.architecture("lm"))
    architecture = described.architecture("score") or f"{described.prefix}ForSequenceClassification"
    assert hasattr(transformers, architecture) == (described.score_class is not None)


@pytest.mark.parametrize("name", [n for family, n in ONE_OF_EACH.items() if FAMILIES[family].score_class])
def test_reward_model(tmp_path, name):
    """A sequence classification model with one label: its scores, and the way back."""
    torch.manual_seed(0)
    hf = ALL[name].hf(num_labels=1)
    reference_class = getattr(transformers, FAMILIES[ALL[name].family].architecture("score"))
    reference = reference_class(transformers.AutoConfig.for_model(**hf)).eval()
    reference.save_pretrained(tmp_path / "theirs")
    spec = model_spec(ModelConfig.load(str(tmp_path / "theirs")))
    engine = NativeEngine(spec, Layout.parse("d1@0"), World(), dtype="float32")
    engine.load(tmp_path / "theirs", seed=0)
    scores = engine.model.scores(engine.model(_tokens(sum(LENGTHS)), LENGTHS)).split(LENGTHS)
    with torch.no_grad():
        for part, score in zip(_tokens(sum(LENGTHS)).split(LENGTHS), scores, strict=True):
            torch.testing.assert_close(score[-1:], reference(part[None]).logits[0], rtol=1e-5, atol=1e-5)
    save_weights(tmp_path / "ours", engine.model)
    again, report = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "ours", output_loading_info=True)
    assert not any(report.values()), report
    theirs = reference.state_dict()
    assert all(torch.equal(value, theirs[key]) for key, value in again.state_dict().items())


CELLS = [(name, layout) for name in ALL for layout in (*LAYOUTS, *(MOE_LAYOUTS if name in MOE_CASES else ()))]
PARAMS = [
    pytest.param(
        name, layout, id=f"{name}-{layout}", marks=() if layout in QUICK[name] else pytest.mark.slow)
    for name, layout in CELLS
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.mktemp("families")


@pytest.mark.parametrize("name, layout", PARAMS)
def test_family_under_layout(pool, base, name, layout):
    logits, gradients, tokens = _reference(name, base / name)
    num_ranks = ParallelStrategy.parse(layout).num_ranks
    text = f"{layout}@{MESHES[num_ranks]}"
    job = (str(base / name), text, str(base / name / layout), _num_new(name))
    results = pool.run(_on_rank, *job, num_ranks=num_ranks)
    torch.testing.assert_close(_whole_logits(results, like=logits), logits, rtol=1e-5, atol=1e-5)
    params = {param.name: param for param in model_spec(ModelConfig.load(str(base / name))).params}
    sums = _sums_over_replicas(results, Layout.parse(text))
    assert {key for key, *_ in sums} == set(params)
    for (key, region, *_), gradient in sums.items():
        if not params[key].trainable:
            assert not gradient.any(), f"{layout} {key}"
            continue
        theirs, largest = _of_transformers(gradients, params[key], region)
        assert largest > 0 or params[key].expert is not None, f"{layout} {key}"
        torch.testing.assert_close(gradient, theirs, rtol=0, atol=1e-4 * largest, msg=f"{layout} {key}")
    generated = {i: row for _, _, rows in results for i, row in rows.items()}
    assert [generated[i] for i in range(len(PROMPT_LENGTHS))] == tokens
    theirs, ours = (load_file(base / name / d / "model.safetensors") for d in ("", layout))
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[key], ours[key]) for key in ours)


def _whole_logits(results, *, like):
    """NaN where no rank has any."""
    found = torch.full_like(like, torch.nan)
    for pieces, _, _ in results:
        for row, column, logits in pieces:
            found[row : row + logits.shape[0], column : column + logits.shape[1]] = logits
    return found


def _sums_over_replicas(results, layout):
    """(parameter, region, stage, tp index) -> the sum of the gradients that ranks over dp and cp have."""
    sums = {}
    for rank, (_, gradients, _) in zip(layout.ranks, results, strict=True):
        at = layout.coordinate(rank)
        for param, (region, gradient) in gradients.items():
            key = (param, region, at.pp, at.tp)
            sums[key] = sums.get(key, 0) + gradient
    return sums


def _of_transformers(gradients, param, region):
    """A region of a parameter's gradient, and the largest entry of the gradient of its whole tensor."""
    _, start, transposed = param.in_file
    whole = gradients[param.in_file.name]
    rows = whole.T if transposed else whole
    (low, high), *rest = region
    return rows[region_slices(((low + start, high + start), *rest))], float(whole.abs().max())
