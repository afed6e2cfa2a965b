"""The rows of a generation: what is prefilled for them, and what decode steps read of the cache."""

import math

import numpy as np

from realhf.models.kv_blocks import DENSE, block_size, shared_tokens, tokens_read
from realhf.planner.cost.expert_load import expected_maximum
from realhf.planner.cost.rates import SharedPrompts
from realhf.planner.workload.problem import Workload


def prefilled(work: Workload, rows: float) -> tuple[float, float]:
    """Return the tokens to prefill for rows of all ages, and the sum of their squared lengths.

    In the first round, the samples of a prompt share its prefill. In each later round, a row is prefilled
    with its prompt and the tokens of its earlier rounds.
    """
    rows_by_age = rows * (work.round.ages / work.round.num_rows)
    tokens = max(1.0, rows_by_age[0] / work.samples_per_prompt) * work.prompt_tokens
    squared = tokens * work.prompt_tokens
    lengths = work.prompt_tokens + work.round_tokens * np.arange(1, work.rounds)
    tokens += float(rows_by_age[1:] @ lengths)
    return tokens, squared + float(rows_by_age[1:] @ lengths**2)


def in_busiest_cohort(rows: np.ndarray, slots: float, cohorts: int, alike_rows: float) -> np.ndarray:
    """Return the expected rows of the cohort that has most, if each has `rows` of its `slots` on average.

    The rows of a cohort are taken to be binomial, in groups of `alike_rows` that end together.
    """
    if cohorts == 1:
        return rows
    deviation = np.sqrt(np.maximum(0.0, rows * (1 - rows / slots)) * alike_rows)
    return np.minimum(slots, rows + expected_maximum(cohorts) * deviation)


def cache_tokens_read(
    work: Workload, context: np.ndarray, longest: np.ndarray, rows: np.ndarray, slots: float,
    alike_rows: float,
) -> np.ndarray:
    """Return the tokens of the cache that are read for each running row of decode steps.

    A step reads the blocks of all slots from the first running row to the last, also those of ended rows in
    between. If less than DENSE of these slots have running rows, the blocks of those are first copied
    together. Running rows are taken to have random slots, in groups of `alike_rows` that end together.
    """
    prompt = math.floor(work.longest_prompt)
    size = block_size([(prompt, work.samples_per_prompt)], max_new_tokens=work.max_new_tokens)
    shared = shared_tokens(math.floor(work.prompt_tokens), work.samples_per_prompt)
    longest = longest + work.longest_prompt - work.prompt_tokens
    own = tokens_read(context - shared, longest - shared, size)
    running = np.maximum(1.0, rows / alike_rows)  # In groups of neighbours, as are the next two.
    places = np.maximum(running, slots / alike_rows)
    span = 1 + (places + 1) * (running - 1) / (running + 1)  # The mean from the first to the last place.
    return shared + own * np.minimum(1 / DENSE, span / running)


def shared_prompts(work: Workload, rows: float, running: np.ndarray) -> SharedPrompts | None:
    """Return the prompts that `running` of `rows` read from the cache; None if no prompt fills a block."""
    tokens = shared_tokens(math.floor(work.prompt_tokens), work.samples_per_prompt)
    if not tokens:
        return None
    first_share = work.round.ages[0] / work.round.num_rows  # Rows in their first round share prompts.
    first_rows = rows * first_share
    num_prompts = max(1.0, first_rows / work.samples_per_prompt)
    ended = np.maximum(0.0, 1 - running / rows)  # The chance of a row to have ended.
    # A prompt is read until all of its rows have ended: together if they are alike, else one by one.
    is_read = 1 - work.alike * ended - (1 - work.alike) * ended ** (first_rows / num_prompts)
    return SharedPrompts(num_prompts * is_read + (1 - first_share) * running, tokens)
