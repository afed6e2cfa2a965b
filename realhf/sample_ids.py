"""The ids of prompts and samples.

A row is an entry of a data set. A prompt is a row at its place in a run, and its id counts these places from
0, so that a row that comes again is another prompt. A sample is one of the `group_size` answers to a prompt
(of preference pairs: the chosen and the rejected completion). The samples of a prompt are a group and have
consecutive ids.
"""

from collections.abc import Iterable, Sequence


def prompt_of(sample: int, group_size: int) -> int:
    """Return the prompt of a sample."""
    return sample // group_size


def samples_of(prompts: Iterable[int], group_size: int) -> list[int]:
    """Return the samples of prompts, in their order."""
    return [prompt * group_size + i for prompt in prompts for i in range(group_size)]


def groups_of(samples: Sequence[int], group_size: int) -> list[list[int]]:
    """Return the places in `samples` of each group, in order of first appearance.

    Filters may have dropped some samples of a group. A `group_size` that divides that of the prompts gives
    parts of their groups.
    """
    groups: dict[int, list[int]] = {}
    for i, sample in enumerate(samples):
        groups.setdefault(prompt_of(sample, group_size), []).append(i)
    return list(groups.values())
