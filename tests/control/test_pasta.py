"""PASTA: its run equals a plain loop; answers see what they may."""

import copy

import pytest
import torch
from safetensors.torch import load_file

from tests.control import programs
from tests.control.programs import ACTIONS, ROWS, STATES


@pytest.fixture
def directory(tmp_path, monkeypatch):
    programs.write_rows(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plain_loop(objective: str) -> list[dict[str, float]]:
    """Return the losses of each step, as a loop in one process computes them."""
    import pasta

    experiment = programs.make("pasta", steps=4, objective=objective)
    rows = load_file(experiment.dataset.path)
    modules = programs.initial(experiment)
    optimizers = {
        name: torch.optim.AdamW(module.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01)
        for name, module in modules.items()}
    for name, optimizer in optimizers.items():  # Parameters with one dim, such as biases, do not shrink.
        matrices = [p for p in modules[name].parameters() if p.dim() > 1]
        others = [p for p in modules[name].parameters() if p.dim() <= 1]
        optimizer.param_groups.clear()
        optimizer.add_param_group({"params": matrices})
        optimizer.add_param_group({"params": others, "weight_decay": 0.0})
    counts = dict.fromkeys(modules, 0)

    def update(role, function, batch, **beside):
        losses = []
        size = len(batch["ids"]) // 2
        for part in range(2):
            some = {key: column[part * size : (part + 1) * size] for key, column in batch.items()}
            shape = (2 + pasta.STEPS * (STATES + ACTIONS),)
            some["noise"] = programs.normal_noise(0, "pretrain", counts[role], some["ids"].tolist(), shape)
            loss = function(modules[role], some, **beside).mean()
            optimizers[role].zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(modules[role].parameters(), 1.0)
            for group in optimizers[role].param_groups:
                group["lr"] = 2e-3 * (counts[role] + 1) / 20  # Warm-up.
            optimizers[role].step()
            counts[role] += 1
            losses.append(loss.item())
        return sum(losses) / 2

    place, metrics = 0, []
    for step in range(4):
        count = 8 if step < 2 else 80
        ids = torch.arange(place, place + count)
        place += count
        batch = {key: column[ids % ROWS] for key, column in rows.items()} | {"ids": ids}
        if step < 2:
            metrics.append({"model/loss": update("model", pasta.pretrain_loss, batch)})
            continue
        batch = {key: column[batch["best"] > 0] for key, column in batch.items()}
        batch["best_window"] = batch["window"]
        model = copy.deepcopy(modules["model"]).requires_grad_(False)
        metrics.append({
            "adapter/loss": update("adapter", pasta.imitation_loss, batch, model=model),
            "perceptron/loss": update(
                "perceptron", lambda *given: pasta.clone_loss(*given, states=STATES), batch)})
    return metrics


@pytest.mark.parametrize("objective", ["bert", "gpt"])
def test_a_run_equals_a_plain_loop(pool, directory, objective):
    ours = pool.run(programs.run, "pasta", directory, {}, {"steps": 4, "objective": objective})[0]
    assert not programs.differences(ours, plain_loop(objective))


def windows(count: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, STATES + ACTIONS, generator=generator, dtype=torch.float64)


def model_of(tokens: str, objective: str):
    from token_model import Pasta

    torch.manual_seed(0)
    model = Pasta(STATES, ACTIONS, tokens, objective, hidden=32, width=16, layers=2).double()
    for parameter in (model.hidden, model.start):
        torch.nn.init.normal_(parameter)
    return model


@torch.no_grad()
@pytest.mark.parametrize("tokens", ["component", "modality"])
@pytest.mark.parametrize("objective", ["bert", "gpt"])
def test_predictions_do_not_see_what_they_predict(tokens, objective):
    """Changing the components that are asked for, and what comes after them, changes no prediction."""
    from token_model import asked_of, predict

    model = model_of(tokens, objective)
    values = windows()
    for question in ("action", "forward", "inverse"):
        asked = asked_of(question, values, STATES)
        changed = torch.where(asked, values + 1, values)
        if question != "action":
            changed[:, -1, STATES:] += 1  # The last action comes after the state, or is not known.
        first, second = (predict(model, model, given, question)[asked] for given in (values, changed))
        assert torch.allclose(first, second, atol=1e-12), question
        shown = values.clone()
        shown[:, 0, 0] += 1
        assert not torch.allclose(predict(model, model, shown, question)[asked], first, atol=1e-9), question


@torch.no_grad()
@pytest.mark.parametrize("tokens", ["component", "modality"])
def test_a_causal_model_sees_only_what_stands_before(tokens):
    model = model_of(tokens, "gpt")
    values = windows()
    hidden = torch.zeros_like(values, dtype=torch.bool)
    before = model(values, hidden)
    values[:, 1, 2] += 1
    after = model(values, hidden)
    width = 1 if tokens == "component" else STATES
    equal = torch.isclose(before, after, atol=1e-12).all(dim=-1).all(dim=0).flatten()
    place = (STATES + ACTIONS) + (3 if width == 1 else STATES)  # Of the first token behind the change.
    assert equal[:place].all() and not equal[place:].any()


def test_bins_and_their_centres():
    from token_model import BINS, bins_of, centres

    values = torch.linspace(-5, 5, 1001, dtype=torch.float64)
    middle = centres(values)
    assert (middle.diff() > 0).all() and torch.allclose(middle, -middle.flip(0))
    assert torch.equal(bins_of(middle), torch.arange(BINS))
    inside = values[values.abs() < 4]
    width = middle.diff().max()
    assert ((middle[bins_of(inside)] - inside).abs() <= width / 2 + 0.1).all()


def test_sizes_are_equal_and_adapters_small(directory):
    counts = {}
    for tokens in ("component", "modality"):
        for name, role in programs.make("pasta", tokens=tokens, width=96, layers=3).roles().items():
            counts[tokens, name] = sum(p.numel() for p in role.module(**role.arguments).parameters())
    most = counts["component", "model"]
    assert 300_000 < most < 400_000
    assert 0.99 * most < counts["modality", "model"] <= most
    assert 0.97 * most < counts["component", "perceptron"] <= most
    assert counts["component", "adapter"] < 10_000
