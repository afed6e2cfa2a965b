"""The rows of the examples that learn from trajectories: transitions, some without actions, and windows."""

from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from trajectories import TASKS, Task, load

from realhf import prepare_once

PER_ROW = 16  # Transitions of a row: fewer rows cost less to deal.
STEPS = 3  # Steps of a window.


@lru_cache
def normal(task: Task) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and the standard deviation of a task's states, by which they are normalised."""
    states = np.concatenate([t["observations"] for t in load(task)])
    return states.mean(axis=0), states.std(axis=0) + 1e-3


def transitions(task: Task) -> dict[str, np.ndarray]:
    """Return the columns of all transitions of a task's trajectories, states normalised.

    `previous` is the state before, or at the start the state itself; `trajectory` is the trajectory's number.
    """
    mean, deviation = normal(task)
    parts = []
    for number, t in enumerate(load(task)):
        state = (t["observations"] - mean) / deviation
        length = len(t["actions"])
        parts.append({
            "previous": state[[0, *range(length - 1)]], "state": state[:-1], "following": state[1:],
            "action": t["actions"], "reward": t["rewards"], "trajectory": np.full(length, number),
            "ended": np.arange(length) == (length - 1 if t["ended"] else length)})
    return {key: np.concatenate([part[key] for part in parts]).astype(np.float32) for key in parts[0]}


def windows(task: Task, steps: int, *, stride: int, held_out: bool) -> dict[str, np.ndarray]:
    """Return windows of normalised states and actions, side by side: (windows, steps, components).

    They are from every tenth trajectory if `held_out`, and else from the others. `best` says which are from a
    tenth of the trajectories, those with the highest returns.
    """
    columns = transitions(task)
    action = columns["action"] - columns["action"].mean(axis=0)
    values = np.concatenate([columns["state"], action / (action.std(axis=0) + 1e-3)], axis=1)
    number = columns["trajectory"]
    starts = np.arange(0, len(values) - steps + 1, stride)
    starts = starts[(number[starts] == number[starts + steps - 1]) & ((number[starts] % 10 == 8) == held_out)]
    return {
        "window": values[starts[:, None] + np.arange(steps)],
        "best": (number[starts] >= 0.9 * (number.max() + 1)).astype(np.float32)}


def rows_path(task: str, seed: int, labelled: str) -> Path:
    """Return the file of a task's rows, labelled in the `lower` half of the trajectories or in `all`."""
    return Path(f"runs/control/ss_orl-{task}-{labelled}-{seed}.safetensors")


def labelled_rows(task: str, seed: int, labelled: str) -> Path:
    """Return the file of the rows, which is made if it is not there.

    A tenth of the trajectories is labelled, drawn from the half with lower returns or from all. A row has
    PER_ROW transitions, drawn without replacement from the labelled trajectories or from the others.
    """
    return prepare_once(rows_path(task, seed, labelled), partial(_write_rows, task, seed, labelled))


def _write_rows(task: str, seed: int, labelled: str, path: Path) -> None:
    rng = np.random.default_rng(seed)
    number = len(load(TASKS[task]))
    chosen = rng.choice(number // 2 if labelled == "lower" else number, number // 10, replace=False)
    columns = transitions(TASKS[task])
    columns["labelled"] = np.isin(columns.pop("trajectory"), chosen).astype(np.float32)
    columns["oracle"] = columns.pop("action")
    hidden, labelled = (np.flatnonzero(columns["labelled"] == value) for value in (0, 1))
    columns["shuffled"] = columns["oracle"].copy()
    columns["shuffled"][hidden] = columns["oracle"][rng.permutation(hidden)]
    groups = [rng.permutation(group) for group in (hidden, labelled)]
    rows = np.concatenate([g[: len(g) // PER_ROW * PER_ROW].reshape(-1, PER_ROW) for g in groups])
    save_file({key: column[rows] for key, column in columns.items()}, path)


def window_rows(task: str, part: str) -> Path:
    """Return the file of the windows to learn from (`train`) or of the others (`test`); make it if needed."""

    def write(path: Path) -> None:
        held_out = part == "test"
        save_file(windows(TASKS[task], STEPS, stride=41 if held_out else 2, held_out=held_out), path)

    return prepare_once(f"runs/control/pasta-{task}-{part}.safetensors", write)
