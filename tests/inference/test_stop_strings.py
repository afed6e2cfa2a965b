"""Stop strings against searching the decoded text, and against transformers' criterion."""

import numpy as np
import pytest
import torch
import transformers

from realhf.calls import Interruption
from realhf.data.light_tokenizer import LightTokenizer, token_bytes, word_tokens
from realhf.data.loader import load_tokenizer
from realhf.inference.stops import StopMatcher, StopStrings, stop_matcher
from tests.inference.tokenizers import SPECIAL, VOCAB_SIZE, write_tokenizer
from tests.tokenizers import llama_tokenizer

STOPS = ("abcab", "é", "€a", " b b", "cc<eos>", "bacab")
"""Strings that are longer than any token of letters, split characters, spaces and the text of a token."""


@pytest.fixture(scope="module", params=["bytes", "fallback", "spaces"])
def directory(request, tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp(request.param), request.param)


def _random_texts(directory, count, length, seed=0):
    """Return random texts, into every third of which the characters of a stop string are written."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.ones(VOCAB_SIZE)
    weights[[i for i in range(15) if i not in SPECIAL]] = 4.0
    weights[0] = 0.0
    if "fallback" in directory:  # Such decoders drop all characters of a run of bytes that has a broken one.
        pieces = [i for i, text in enumerate(token_bytes(directory)) if not text.isascii()]
        weights[pieces] = 0.0
    drawn = torch.multinomial(weights.expand(count, -1), length, replacement=True, generator=generator)
    texts = drawn.tolist()
    light = LightTokenizer(directory)
    for i in range(0, count, 3):
        stop = light.encode(STOPS[i // 3 % len(STOPS)], add_special_tokens=False)
        start = i % (length - len(stop))
        texts[i][start : start + len(stop)] = stop
    return texts


def _first_end(tokenizer, tokens, stops):
    """Return how many tokens there are when the decoded text first contains a stop string."""
    before = tokenizer.encode("abab", add_special_tokens=False)
    start = len(tokenizer.decode(before))
    for count in range(1, len(tokens) + 1):
        text = tokenizer.decode(before + tokens[:count])[start:]
        if any(stop in text for stop in stops):
            return count
    return None


def _our_end(matcher, tokens):
    state = np.zeros(1, np.int64)
    for count, token in enumerate(tokens, start=1):
        state, found = matcher.advance(state, np.array([token]))
        if found[0]:
            return count
    return None


def test_texts_end_where_the_decoded_text_first_has_a_stop_string(directory):
    tokenizer = LightTokenizer(directory)
    matcher = stop_matcher(directory, STOPS)
    texts = _random_texts(directory, 300, 25)
    expected = [_first_end(tokenizer, tokens, STOPS) for tokens in texts]
    assert [_our_end(matcher, tokens) for tokens in texts] == expected
    for stop in STOPS:
        assert any(_first_end(tokenizer, tokens, [stop]) is not None for tokens in texts), stop
    assert 30 < expected.count(None) < 270


def test_ends_are_those_of_transformers_criterion(directory):
    """(The criterion does not know the bytes of tokens that are not text.)"""
    stops = STOPS[:-1] if directory.endswith("spaces0") else STOPS
    matcher = stop_matcher(directory, stops)
    criterion = transformers.StopStringCriteria(load_tokenizer(directory), list(stops))
    texts = _random_texts(directory, 60, 20, seed=1)
    for tokens in texts:
        ends = [n for n in range(1, 21) if criterion(torch.tensor([tokens[:n]]), None).item()]
        assert _our_end(matcher, tokens) == (ends[0] if ends else None)


def test_bytes_of_tokens_are_those_of_the_decoded_text(directory):
    texts = token_bytes(directory)
    assert len(texts) == VOCAB_SIZE and [texts[i].decode() for i in SPECIAL] == list(SPECIAL.values())
    tokenizer = LightTokenizer(directory)
    for tokens in _random_texts(directory, 50, 20, seed=2):
        joined = b"".join(texts[i] for i in tokens)
        start = len(tokenizer.decode(before := tokenizer.encode("c", add_special_tokens=False)))
        decoded = tokenizer.decode(before + tokens)[start:]
        assert joined.decode(errors="replace").replace("�", "") == decoded.replace("�", "")


@pytest.mark.parametrize("split", [0, 1, 7, 24])
def test_rounds_go_on_where_the_text_stood(directory, split):
    """The first tokens are those of earlier rounds, of which only the last bytes are read again."""

    class Samples:
        texts = _random_texts(directory, 100, 25, seed=3)
        prompts = [[*text[:5], *text[:split]] for text in texts]
        num_drawn = np.full(100, split)

    expected = [_our_end(stop_matcher(directory, STOPS), tokens) for tokens in Samples.texts]
    running = np.array([i for i, end in enumerate(expected) if end is None or end > split])
    stops = StopStrings(stop_matcher(directory, STOPS))
    for count in range(split, 25):
        found = stops.advance(Samples, running, np.array([Samples.texts[i][count] for i in running]))
        assert found.tolist() == [expected[i] == count + 1 for i in running]
        running = running[~found]
    assert len(running) == expected.count(None) > 20


def test_overlapping_strings_are_all_found():
    """Texts of two letters, read in tokens of one and two bytes."""
    texts = [b"a", b"b", b"ab", b"ba", b"aa", b"bb"]
    stops = ["aab", "abaab", "bb", "baba"]
    matcher = StopMatcher(stops, texts)
    generator = np.random.default_rng(0)
    for _ in range(300):
        tokens = generator.integers(0, len(texts), 8).tolist()
        whole = [b"".join(texts[i] for i in tokens[:n]).decode() for n in range(1, 9)]
        ends = [n for n, text in enumerate(whole, start=1) if any(stop in text for stop in stops)]
        assert _our_end(matcher, tokens) == (ends[0] if ends else None)
    assert _our_end(matcher, [99, 5, 99]) == 2  # Tokens that the tokenizer does not have have no text.


def test_words_have_tokens_with_and_without_a_space(directory):
    light = LightTokenizer(directory)
    expected = {tuple(light.encode(text, add_special_tokens=False)) for text in ("ab", " ab", "c", " c")}
    assert set(word_tokens(directory, ("ab", "c"))) == expected and len(expected) == 4


def test_words_and_phrases_get_no_space_of_the_tokenizer():
    """A tokenizer like Llama 2's writes a space before every text, and an answer has none there."""
    light = LightTokenizer(llama_tokenizer())
    phrase = Interruption(after_tokens=1, phrase="blue", end="ab").tokenized(llama_tokenizer())
    before = light.encode("1=")
    for tokens, text in ((phrase.phrase, "blue"), (phrase.end, "ab")):
        assert light.decode([*before, *tokens], skip_special_tokens=True) == f"1={text}"
    words = word_tokens(llama_tokenizer(), ("blue",))
    texts = {light.decode([*before, *word], skip_special_tokens=True) for word in words}
    assert texts == {"1=blue", "1= blue"}


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match="sampling.stop needs the tokenizer: .*json cannot be read"):
        stop_matcher(str(tmp_path), ("a",))
