"""Later pieces of long prompts with latent attention, whose keys and values are computed a part at a time."""

import pytest
import torch
import transformers

from realhf.devices import chunk_sizes
from realhf.inference.forward_batch import (
    ChunkPages,
    ExpandedPieces,
    PagedBackends,
    PagedTokens,
    chunk_pages,
    paged_chunks,
    prefill,
)
from realhf.inference.kv_cache import KVCache
from realhf.inference.scheduler import Chunk, Prompt
from tests.families import MOE_CASES
from tests.inference.paged import PagedReference, engine_of, write_family
from tests.inference.test_generate import _generate, long_prompts
from tests.realloc.test_memory import Storages
from tests.samples import marked

PAGE = 16


class Counted(PagedReference):
    """The reference, and the numbers of keys in each part of a prompt."""

    def __init__(self):
        super().__init__()
        self.parts = []

    def over_part(self, q, k, v, queries, keys, kind, *, is_causal):
        if not is_causal:
            self.parts.append(len(k))
        return super().over_part(q, k, v, queries, keys, kind, is_causal=is_causal)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A directory with a small model of DeepSeek-V3's family, in float64, by transformers."""
    directory = tmp_path_factory.mktemp("deepseek")
    torch.manual_seed(0)
    hf = MOE_CASES["deepseek-v3"].hf(initializer_range=0.3, eos_token_id=1, max_position_embeddings=512)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**hf)).double()
    model.save_pretrained(directory)
    return directory


def _engine(directory, backend):
    engine = engine_of(directory, paged=backend)
    engine.load(directory, seed=0)
    return engine


@pytest.mark.parametrize("most", marked([7, 16, 64, 1000], quick=[0, 3]))
def test_logprobs_are_those_of_transformers_however_many_tokens_are_expanded(model_dir, monkeypatch, most):
    monkeypatch.setattr(chunk_sizes, "EXPANDED_TOKENS", most)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager")
    backend = Counted()
    _, made = _generate(_engine(model_dir, backend), long_prompts(), prefill_tokens=30, temperature=0.7)
    # Pieces of 30 tokens at 30, 60 and 90 of a prompt of 130; and the last 10, which attend to latents.
    assert max(backend.parts) == min(most, 90) and sum(backend.parts) > 100
    columns = (made[key].split() for key in ("sequence_ids", "response_mask", "gen_logprobs"))
    for ids, mask, logprobs in zip(*columns, strict=True):  # (Their routers are in float32.)
        logits = theirs(ids[None]).logits[0, :-1] / 0.7
        wanted = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        torch.testing.assert_close(logprobs[1:], wanted * mask[1:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("most", [5, 23, 50, 1000])
def test_pieces_of_several_prompts_are_continued_together(tmp_path, monkeypatch, most):
    """Contexts of unequal lengths, which the parts cut anywhere, against a pass over the whole prompts."""
    monkeypatch.setattr(chunk_sizes, "EXPANDED_TOKENS", most)
    write_family("deepseek-v3", tmp_path)
    engine = engine_of(tmp_path)
    model = engine.model
    lens = [(40, 30), (3, 25), (17, 14), (64, 40)]  # Earlier tokens, and those of the piece.
    generator = torch.Generator().manual_seed(0)
    free = iter(torch.randperm(40, generator=generator).tolist())
    prompts = []
    for earlier, own in lens:
        tokens = torch.randint(2, 67, (earlier + own,), generator=generator).tolist()
        prompts.append(Prompt(tokens, [0], blocks=[next(free) for _ in range(-(-len(tokens) // PAGE))]))
    firsts = [Chunk(prompt, 0, earlier) for prompt, (earlier, _) in zip(prompts, lens, strict=True)]
    nexts = [Chunk(chunk.prompt, chunk.stop, len(chunk.prompt.tokens)) for chunk in firsts]
    cache = KVCache.of(model, 40, PAGE)
    backend = Counted()
    cpu = torch.device("cpu")
    with torch.inference_mode():
        ids = [torch.tensor([i for chunk in chunks for i in chunk.tokens]) for chunks in (firsts, nexts)]
        model.advance(ids[0], cache, [prefill(firsts, page_size=PAGE, device=cpu)])
        pages = ChunkPages(*map(torch.from_numpy, chunk_pages(nexts, page_size=PAGE)))
        segment = paged_chunks(PagedBackends(model, backend), pages, nexts)
        found = model.advance(ids[1], cache, [segment]).split([own for _, own in lens])
        whole = torch.tensor([i for prompt in prompts for i in prompt.tokens])
        wanted = model(whole, [sum(pair) for pair in lens]).split([sum(pair) for pair in lens])
    assert isinstance(segment, ExpandedPieces)
    assert backend.parts == len(model.blocks) * [min(most, 124 - i) for i in range(0, 124, most)]
    for ours, theirs, (earlier, _) in zip(found, wanted, lens, strict=True):
        torch.testing.assert_close(ours, theirs[earlier:], rtol=1e-9, atol=1e-9)


def test_few_tokens_attend_to_the_latents(tmp_path):
    """A latent of 10 dims costs 110 products to expand, and saves 9 for every query: 13 queries pay."""
    write_family("deepseek-v3", tmp_path)
    backends = PagedBackends(engine_of(tmp_path).model, PagedReference())
    for own, kind in ((12, PagedTokens), (13, ExpandedPieces)):
        chunk = Chunk(Prompt(list(range(2, 60)), [0], blocks=[0, 1, 2, 3]), 20, 20 + own)
        pages = ChunkPages(*map(torch.from_numpy, chunk_pages([chunk], page_size=PAGE)))
        assert type(paged_chunks(backends, pages, [chunk])) is kind


@pytest.mark.slow
def test_a_part_bounds_the_memory(model_dir, monkeypatch):
    """Of a prompt of 400 tokens, each token has 8 heads with keys of 10 dims and values of 5 in float64."""
    prompts = [torch.randint(2, 67, (400,), generator=torch.Generator().manual_seed(0)).tolist()]
    peaks = []
    for most in (1000, 20):
        monkeypatch.setattr(chunk_sizes, "EXPANDED_TOKENS", most)
        engine = _engine(model_dir, PagedReference())
        _generate(engine, prompts, prefill_tokens=40, max_new_tokens=2)
        with Storages() as storages:
            _generate(engine, prompts, prefill_tokens=40, max_new_tokens=2)
        peaks.append(storages.peak)
    assert peaks[0] - peaks[1] > 0.8 * (360 - 20) * 8 * 15 * 8
