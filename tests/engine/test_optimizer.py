"""Training against transformers and torch.optim.AdamW, learning rates against their schedulers."""

import functools
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import transformers
from safetensors.torch import load_file

from realhf.algorithms.sft import CrossEntropy
from realhf.calls import OptimizerConfig, TrainStep, learning_rate
from realhf.checkpoint.hf import save_weights
from realhf.data.batch import Batch, Packed
from realhf.distributed.world import ParallelGroups, World
from realhf.engine.native import NativeEngine
from realhf.engine.optimizer import ShardedAdamW
from realhf.graph import FunctionCall
from realhf.layout import Layout
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec, region_slices
from realhf.nn.parameters import ShardedParameters
from tests.distributed.emulated_nccl import NcclWorld
from tests.distributed.recording import fault_of
from tests.engine.reference import plain_model, ragged_rows
from tests.families import CASES, MOE_CASES
from tests.samples import drawn, marked

NUM_STEPS = 3
OPTIMIZER = OptimizerConfig(lr=3e-3, eps=1e-6, weight_decay=0.1, max_grad_norm=5.95, warmup_steps=2)
CALL = FunctionCall(
    name="actor_train",
    kind="train_step",
    inputs=("sequence_ids", "response_mask"),
    role="actor",
    work=TrainStep(CrossEntropy()),
)


def _batch(rows, *, dp=1, index=0):
    """Return a batch of every dp-th row."""
    rows = rows[index::dp]
    ids = Packed.of([torch.tensor(p + c) for p, c in rows])
    mask = Packed.of([torch.tensor([0.0] * len(p) + [1.0] * len(c)).double() for p, c in rows])
    return Batch(list(range(len(rows))), {"sequence_ids": ids, "response_mask": mask})


def _plain_training(model, steps):
    """Loss and gradient norm of every step, done the textbook way on padded rows."""
    adamw = torch.optim.AdamW(_parameter_groups(model.parameters()), betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)
    history = []
    for number, rows in enumerate(steps):
        for group in adamw.param_groups:
            group["lr"] = OPTIMIZER.lr * min(1.0, (number + 1) / OPTIMIZER.warmup_steps)
        width = max(len(p) + len(c) for p, c in rows)
        ids = torch.tensor([p + c + [0] * (width - len(p + c)) for p, c in rows])
        labels = torch.tensor([[-100] * len(p) + c + [-100] * (width - len(p + c)) for p, c in rows])
        answer = model(input_ids=ids, labels=labels)
        loss = torch.nn.functional.cross_entropy(answer.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        torch.testing.assert_close(answer.loss.double(), loss, rtol=1e-6, atol=0)  # theirs is in float32
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_grad_norm)
        adamw.step()
        adamw.zero_grad()
        history.append((loss.item(), norm.item()))
    return history


def _parameter_groups(parameters):
    """Norms and biases have no weight decay."""
    parameters = list(parameters)
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


def _train(world, text, source, target, steps):
    layout = Layout.parse(text)
    if world.rank not in layout:
        return None
    spec = model_spec(ModelConfig.load(str(source)))
    engine = NativeEngine(spec, layout, world, dtype="float64", optimizer=OPTIMIZER)
    engine.load(source, seed=0)
    metrics = []
    for rows in steps:
        batch = _batch(rows, dp=layout.dp, index=layout.coordinate(world.rank).dp)
        metrics.append(engine.train(CALL, [batch], micro_batch_tokens=20))
    save_weights(target, engine.model)
    return [(m["loss"], m["grad_norm"]) for m in metrics] if world.rank == layout.result_ranks[0] else None


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def plain(request, tmp_path_factory):
    """Initial directory, steps of rows, history and final weights of the textbook training."""
    directory = tmp_path_factory.mktemp("plain")
    model = plain_model(directory, tied=request.param)
    steps = [ragged_rows(9, seed=seed) for seed in range(NUM_STEPS)]
    history = _plain_training(model, steps)
    clipped = [norm > OPTIMIZER.max_grad_norm for _, norm in history]
    assert any(clipped) and not all(clipped), history
    return directory, steps, history, model.state_dict()


@pytest.mark.parametrize(
    "layout",
    marked([
        *("d1@0", "d2@0-1", "d4@0-3", "t2@0-1", "t4@0-3", "p2@0-1", "d2p2@3,1,0,2"),
        *("c2@0-1", "c2t2@0-3", "d2c2@0-3"),
    ], quick=[8]),
)
def test_training_is_that_of_torch_on_the_plain_model(pool, plain, tmp_path, layout):
    directory, steps, history, weights = plain
    results = pool.run(_train, layout, directory, tmp_path / "out", steps)
    (metrics,) = [result for result in results if result is not None]
    torch.testing.assert_close(torch.tensor(metrics), torch.tensor(history), rtol=1e-9, atol=1e-9)
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert saved.keys() >= weights.keys() - {"lm_head.weight"}
    for name, tensor in saved.items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-8, atol=1e-9, msg=name)


STEPS_OF_GRADIENTS = 3
SPREAD = [
    ("qwen2", "d2c2@0-3"), ("qwen2", "c2@0-1"), ("qwen2", "c4@3,0,1,2"), ("qwen2", "p2c2@0-3"),
    ("qwen3-moe", "d4e2@0-3"), ("qwen3-moe", "d2e2t2@0-3"), ("qwen3-moe", "d4e4@0-3"),
    ("qwen3-moe", "d2e2c2@0-3"), ("qwen3-moe", "d2e2p2@0-3"), ("deepseek-v3", "d2e2p2@0-3"),
]


def _update_by_made_up_gradients(world, hf, text, dtype=torch.float64, section_numel=1 << 26):
    """Return name -> (region, values) of this rank after some steps; each rank's gradient is the whole one
    divided by the number of ranks that sum theirs."""
    layout = Layout.parse(text)
    if world.rank not in layout:
        return None
    spec = replace(model_spec(hf_config(hf)), section_numel=section_numel)
    shards = Shards(spec, ParallelGroups.create(world, layout), dtype=dtype)
    start = _normal(spec, seed=100)
    for name, region in shards.regions.items():
        shards.shards()[name].copy_(start[name][region_slices(region)])
    optimizer = ShardedAdamW(shards, OPTIMIZER)
    sections = spec.sections(layout, world.rank)
    shares = {name: 1 / len(ranks) for regions, ranks in sections for name in regions}
    norms = []
    for step in range(STEPS_OF_GRADIENTS):
        grads = _normal(spec, seed=step)
        for name, grad in shards.grad_shards().items():
            grad.copy_(shares[name] * grads[name][region_slices(shards.regions[name])])
        norms.append(optimizer.step()["grad_norm"])
    assert {name: tuple(box for box, _ in pieces) for name, pieces in optimizer.shards.items()} == (
        spec.boxes_held_by(layout, world.rank, sharded=True))
    for name, pieces in optimizer.shards.items():
        for box, owned in pieces:
            mine = shards.shards()[name][region_slices(box, within=shards.regions[name])]
            assert owned.dtype == torch.promote_types(dtype, torch.float32)
            assert torch.equal(owned.to(dtype), mine), name
    return norms, {n: (region, shards.shards()[n]) for n, region in shards.regions.items()}


class Shards(ShardedParameters):
    """The parameters of a model, of any family; made-up gradients are whole within a replica."""

    def finish_grads(self, names=None):
        pass


def _normal(spec, *, seed):
    generator = torch.Generator().manual_seed(seed)
    return {p.name: torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in spec.params}


def hf_config(name):
    case = {**CASES, **MOE_CASES}[name]
    return ModelConfig.from_hf(transformers.AutoConfig.for_model(**case.hf(**_ARCHITECTURES[name])).to_dict())


_ARCHITECTURES = {
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3-moe": {"architectures": ["Qwen3MoeForCausalLM"]},
    "deepseek-v3": {"architectures": ["DeepseekV3ForCausalLM"]},
}


@pytest.mark.parametrize(("family", "layout"), drawn(SPREAD, 4))
@pytest.mark.parametrize("section_numel", marked([1 << 26, 3000], quick=[1]), ids=["whole", "in sections"])
def test_updates_are_those_of_one_process(pool, family, layout, section_numel):
    norms, whole = _update_by_made_up_gradients(World(), family, "d1@0")
    spec = model_spec(hf_config(family))
    for step, norm in enumerate(norms):
        squares = sum(grad.square().sum().item() for grad in _normal(spec, seed=step).values())
        assert norm == pytest.approx(squares**0.5, rel=1e-12)
    found = pool.run(_update_by_made_up_gradients, family, layout, torch.float64, section_numel)
    results = [r for r in found if r is not None]
    assert len(results) == len(Layout.parse(layout).ranks)
    for their_norms, shards in results:
        assert their_norms == pytest.approx(norms, rel=1e-12)
        for name, (region, values) in shards.items():
            expected = whole[name][1][region_slices(region)]
            torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("family", ["qwen2", "qwen3-moe", "deepseek-v3"])
@pytest.mark.parametrize("section_numel", [1 << 26, 3000], ids=["whole", "in sections"])
def test_updates_are_those_of_torch_without_decay_of_norms_and_biases(family, section_numel):
    """With the test above, this holds under every layout."""
    _, updated = _update_by_made_up_gradients(World(), family, "d1@0", section_numel=section_numel)
    spec = model_spec(hf_config(family))
    params = {p.name: torch.nn.Parameter(_normal(spec, seed=100)[p.name]) for p in spec.params if p.trainable}
    adamw = torch.optim.AdamW(
        _parameter_groups(params.values()), lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)
    for step in range(STEPS_OF_GRADIENTS):
        grads = _normal(spec, seed=step)  # The norm of all of them is clipped, those of frozen ones included.
        norm = sum(grad.square().sum() for grad in grads.values()) ** 0.5
        for group in adamw.param_groups:
            group["lr"] = learning_rate(OPTIMIZER, step)
        for name, param in params.items():
            param.grad = grads[name] * (OPTIMIZER.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        adamw.step()
    assert min(param.dim() for param in params.values()) == 1
    for name, param in params.items():
        torch.testing.assert_close(updated[name][1], param.data, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("name", [*CASES, *MOE_CASES])
def test_weights_that_decay_are_those_of_the_trainer_of_transformers(name):
    hf = {**CASES, **MOE_CASES}[name].hf()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**hf))
    theirs = set(transformers.Trainer.get_decay_parameter_names(None, model))
    sizes = [p.numel() for at, p in model.named_parameters() if at in theirs]
    spec = model_spec(ModelConfig.from_hf({**hf, "architectures": [type(model).__name__]}))
    decays = [p.numel for p in spec.params if not p.is_vector]
    assert sum(decays) == sum(sizes)
    assert sum(p.numel for p in spec.params if p.trainable) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("family", "layout"), [("qwen2", "d2c2@0-3"), ("qwen3-moe", "d2e2t2@0-3")])
def test_updates_of_bfloat16_are_those_of_one_process(pool, family, layout):
    """Up to the last bit, where the master copies are rounded to either side of it."""
    dtype = torch.bfloat16
    norms, whole = _update_by_made_up_gradients(World(), family, "d1@0", dtype)
    results = [r for r in pool.run(_update_by_made_up_gradients, family, layout, dtype) if r is not None]
    assert len(results) == len(Layout.parse(layout).ranks)
    for their_norms, shards in results:
        assert their_norms == pytest.approx(norms, rel=1e-5)
        for name, (region, values) in shards.items():
            expected = whole[name][1][region_slices(region)]
            assert values.dtype == dtype and (values == expected).double().mean() > 0.99, name
            torch.testing.assert_close(values, expected, rtol=2**-7, atol=1e-5, msg=name)


def test_bfloat16_model_learns_with_a_float32_master_copy(tmp_path):
    """The weights stay the rounded master copy: steps far below bfloat16's resolution add up."""
    plain_model(tmp_path)
    spec = model_spec(ModelConfig.load(str(tmp_path)))
    config = OptimizerConfig(lr=1e-5, weight_decay=0.0)
    engine = NativeEngine(spec, Layout.parse("d1@0"), World(), dtype="bfloat16", optimizer=config)
    engine.load(tmp_path, seed=0)
    before = {name: shard.clone() for name, shard in engine.model.shards().items()}
    batch = _batch(ragged_rows(9, seed=0))
    losses = [engine.train(CALL, [batch], micro_batch_tokens=40)["loss"] for _ in range(40)]
    after = engine.model.shards()
    assert all(shard.dtype == torch.bfloat16 for shard in after.values())
    name = "model.layers.0.mlp.down_proj.weight"
    change = (after[name] - before[name]).float().abs()
    # Adam moves a weight by up to lr per step; a bfloat16 weight of 0.2 only takes steps of 0.0005 to 0.001.
    assert 0.2 < (change > 0).float().mean() < 1.0
    assert change.max() <= 40e-5 + 2**-9
    assert losses[-1] < losses[0] - 0.02, losses
    assert all(later < earlier + 0.01 for earlier, later in pairwise(losses))


def _rates(config, num_steps):
    return [learning_rate(config, step) for step in range(num_steps)]


def _scheduled(make_scheduler, num_steps, lr=0.3):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler, rates = make_scheduler(optimizer), []
    for _ in range(num_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_learning_rates_are_those_of_transformers(schedule):
    """transformers' warm-up starts at 0; ours is one step ahead of it, so that no step is wasted."""
    config = OptimizerConfig(lr=0.3, schedule=schedule, warmup_steps=5, total_steps=30)
    theirs = "constant_with_warmup" if schedule == "constant" else schedule
    expected = _scheduled(lambda o: transformers.get_scheduler(theirs, o, 5, 30), 30)
    assert _rates(config, 30) == pytest.approx([*expected[1:6], *expected[5:]], abs=1e-12)


def test_learning_rates_with_a_floor_are_those_of_torch():
    floor = {"lr": 0.3, "total_steps": 20, "min_lr_ratio": 0.1}
    schedulers = torch.optim.lr_scheduler
    cosine = _scheduled(lambda o: schedulers.CosineAnnealingLR(o, T_max=20, eta_min=0.03), 21)
    linear = _scheduled(lambda o: schedulers.LinearLR(o, 1.0, 0.1, total_iters=20), 25)
    ours = _rates(OptimizerConfig(schedule="cosine", **floor), 24)
    assert ours == pytest.approx([*cosine, 0.03, 0.03, 0.03], abs=1e-12)
    assert _rates(OptimizerConfig(schedule="linear", **floor), 25) == pytest.approx(linear, abs=1e-12)
    warmup = _scheduled(lambda o: schedulers.LinearLR(o, 1 / 8, 1.0, total_iters=7), 12)
    assert _rates(OptimizerConfig(lr=0.3, warmup_steps=8), 12) == pytest.approx(warmup, abs=1e-12)


@functools.cache
def _nccl_world(world):
    store = torch.distributed.PrefixStore("optimizer on emulated nccl", world._store)
    return NcclWorld(rank=world.rank, size=world.size, store=store, shared_memory=False)


def _update_by_code_for_nccl(world, *arguments):
    nccl = _nccl_world(world)
    nccl.log.posts.clear()
    return _update_by_made_up_gradients(nccl, *arguments), list(nccl.log.posts)


@pytest.mark.parametrize(
    ("family", "layout"), [("qwen2", "d2t2@0-3"), ("qwen2", "d2c2@0-3"), ("qwen3-moe", "d4e2@0-3")])
def test_updates_by_the_code_for_nccl_are_those_of_one_process(pool, family, layout):
    norms, whole = _update_by_made_up_gradients(World(), family, "d1@0")
    answers = pool.run(_update_by_code_for_nccl, family, layout, torch.float64, 3000)
    for (their_norms, shards), _ in answers:
        assert their_norms == pytest.approx(norms, rel=1e-12)
        for name, (region, values) in shards.items():
            expected = whole[name][1][region_slices(region)]
            torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12, msg=name)
    assert fault_of({rank: posts for rank, (_, posts) in enumerate(answers)}) == ""
