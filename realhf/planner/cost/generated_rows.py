"""The rows of a generation: what is prefilled for them, and what decode steps read of the cache."""

import math
from statistics import NormalDist

import numpy as np

from realhf.planner.cost.rates import SharedPrompts
from realhf.planner.workload.problem import Workload
from realhf.sizes.kv_blocks import DENSE, block_size, shared_tokens, tokens_read


def prefilled(work: Workload, rows: float) -> tuple[float, float]:
    """Return the tokens to prefill for rows of all ages, and the sum of their squared lengths.

    Samples share their prompt in its first round. Later, each row is prefilled with what it has so far.
    """
    rows_by_age = rows * (work.round.ages / work.round.num_rows)
    tokens = max(1.0, rows_by_age[0] / work.samples_per_prompt) * work.prompt_tokens
    squared = tokens * work.prompt_tokens
    lengths = work.prompt_tokens + work.round_tokens * np.arange(1, work.rounds)
    tokens += float(rows_by_age[1:] @ lengths)
    return tokens, squared + float(rows_by_age[1:] @ lengths**2)


def in_busiest_cohort(rows: np.ndarray, slots: float, cohorts: int, alike_rows: float) -> np.ndarray:
    """Return the expected rows of the cohort that has most, if each has `rows` of its `slots` on average.

    `alike_rows` of them end together. The expected maximum of n normal numbers is about their
    (n - 3/8) / (n + 1/4) quantile (Blom 1958).
    """
    if cohorts == 1:
        return rows
    deviation = np.sqrt(np.maximum(0.0, rows * (1 - rows / slots)) * alike_rows)
    return np.minimum(slots, rows + NormalDist().inv_cdf((cohorts - 0.375) / (cohorts + 0.25)) * deviation)


def cache_tokens_read(
    work: Workload, context: np.ndarray, longest: np.ndarray, rows: np.ndarray, slots: float,
    alike_rows: float,
) -> np.ndarray:  # fmt: skip
    """Return the tokens of the cache that are read for each running row of decode steps.

    Blocks of ended rows are read, too, if they lie between those of running ones, unless they are so many
    that the others are copied. `alike_rows` neighbours end together.
    """
    prompt = math.floor(work.longest_prompt)
    size = block_size([(prompt, work.samples_per_prompt)], max_new_tokens=work.max_new_tokens)
    shared = shared_tokens(math.floor(work.prompt_tokens), work.samples_per_prompt)
    longest = longest + work.longest_prompt - work.prompt_tokens
    own = tokens_read(context - shared, longest - shared, size)
    running = np.maximum(1.0, rows / alike_rows)
    places = np.maximum(running, slots / alike_rows)
    span = 1 + (places + 1) * (running - 1) / (running + 1)  # From the first to the last of random places.
    return shared + own * np.minimum(1 / DENSE, span / running)


def shared_prompts(work: Workload, rows: float, running: np.ndarray) -> SharedPrompts | None:
    """Return the prompts that `running` of some rows read from the cache; None if none has whole blocks."""
    saved = shared_tokens(math.floor(work.prompt_tokens), work.samples_per_prompt)
    if not saved:
        return None
    share = work.round.ages[0] / work.round.num_rows  # Rows in their first round; others share nothing.
    distinct = max(1.0, rows * share / work.samples_per_prompt)
    ended = np.maximum(0.0, 1 - running / rows)
    # Prompts that some row still continues; if rows are alike, all end together.
    prompts = distinct * (1 - work.alike * ended - (1 - work.alike) * ended ** (rows * share / distinct))
    return SharedPrompts(prompts + (1 - share) * running, saved)
