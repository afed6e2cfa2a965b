"""Times a step of sampling with each option: the logits of some rows are given, and their tokens are drawn.

Run as `python benchmarks/measure/sampling_options.py [rows] [vocabulary]`.
"""

import sys
import time

import numpy as np
import torch

from realhf.calls import Generate, SamplingConfig
from realhf.distributed.world import World
from realhf.inference.response_buffer import PromptGroup, ResponseBuffer
from realhf.inference.sampling import sample
from realhf.inference.stops import StopMatcher, StopStrings

STEPS = 12
OPTIONS = {
    "none": {},
    "min_p": {"min_p": 0.05},
    "logit_bias": {"logit_bias": tuple((i, 1.0) for i in range(300))},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "presence and frequency": {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    "bad_word_ids": {"bad_word_ids": tuple((i, i + 1, i + 2) for i in range(100))},
    "min_new_tokens": {"min_new_tokens": 10},
    "all": {
        "min_p": 0.05, "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5,
        "bad_word_ids": ((1, 2),), "min_new_tokens": 10, "logit_bias": ((1, 1.0),),
    },
}


def seconds_per_step(options: dict, *, rows: int, vocabulary: int) -> float:
    """Return the median time of a step after the first ones."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    work = Generate(SamplingConfig(max_new_tokens=STEPS, **options))
    samples = ResponseBuffer(
        rows, work=work, eos_ids=[0], seed=0, device=device, vocab_range=(0, vocabulary))
    prompt = torch.randint(1, vocabulary, (512,), generator=torch.Generator().manual_seed(0)).tolist()
    for i in range(rows):
        samples.add(PromptGroup(list(prompt), [i]))
    group = World().group((0,))
    numbers = list(range(rows))
    times = []
    for _ in range(STEPS - 1):
        logits = torch.randn(rows, vocabulary, device=device)
        logits[:, 0] = -1e4
        start = time.perf_counter()
        processing = samples.processing(numbers)
        tokens, logprobs = sample(
            logits, samples.draws(numbers), config=work.sampling, vocab_start=0, group=group,
            processing=processing)
        samples.append(numbers, samples.record(samples.at(numbers), tokens, logprobs, None))
        times.append(time.perf_counter() - start)
    return float(np.median(times[3:]))


def seconds_of_stops(*, rows: int) -> float:
    """Return the time of a step in which rows read a token each for four stop strings."""
    generator = np.random.default_rng(0)
    texts = [bytes(generator.integers(97, 123, size).tolist()) for size in generator.integers(1, 12, 50_000)]
    stops = StopStrings(StopMatcher(["</answer>", "\n\n", "Question:", "<|end|>"], texts))

    class Samples:
        prompts = [[1]] * rows
        num_drawn = np.zeros(rows, np.int64)

    numbers = np.arange(rows)
    times = []
    for _ in range(50):
        tokens = generator.integers(0, len(texts), rows)
        start = time.perf_counter()
        stops.advance(Samples, numbers, tokens)
        times.append(time.perf_counter() - start)
    return float(np.median(times))


if __name__ == "__main__":
    shape = [int(word) for word in sys.argv[1:]]
    rows, vocabulary = shape if len(shape) == 2 else (64, 152_000)
    plain = seconds_per_step({}, rows=rows, vocabulary=vocabulary)
    for name, options in OPTIONS.items():
        seconds = seconds_per_step(options, rows=rows, vocabulary=vocabulary)
        print(f"{name:24} {1000 * seconds:8.2f} ms  {seconds / plain:5.2f} of plain sampling")
    print(f"{'stop':24} {1000 * seconds_of_stops(rows=rows):8.2f} ms more")
