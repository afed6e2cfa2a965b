"""Tiny tokenizers of several kinds, whose tokens are short texts of few letters."""

import json
from itertools import product
from pathlib import Path

import tokenizers

SPECIAL = {0: "<pad>", 3: "<eos>", 20: "<end>"}
"""Special tokens by id; the last two are those of tests.inference.rounds."""
VOCAB_SIZE = 67


def _texts(space, pieces):
    """Return the tokens by id: texts of a, b and c, with and without a space, and pieces of characters."""
    words = ["".join(letters) for n in (1, 2, 3) for letters in product("abc", repeat=n)]
    texts = [space, *(space + word for word in words[:6]), *pieces, *words]
    texts += [chr(ord("d") + i) for i in range(VOCAB_SIZE - len(SPECIAL) - len(texts))]
    rest = iter(texts)
    return [SPECIAL[i] if i in SPECIAL else next(rest) for i in range(VOCAB_SIZE)]


def write_tokenizer(directory: Path, kind: str) -> str:
    """Write a tokenizer.json of VOCAB_SIZE tokens: `bytes` (byte-level), `fallback` (byte tokens as in Llama
    2) or `spaces` (a mark for spaces, as in Unigram models); return the directory.
    """
    decoders = tokenizers.decoders
    if kind == "bytes":
        pieces = ["Ã", "©", "â", "Ĥ", "¬"]  # The bytes of é and €.
        space, decoder = "Ġ", decoders.ByteLevel()
    else:
        pieces = ["<0xC3>", "<0xA9>", "<0xE2>", "<0x82>", "<0xAC>"] if kind == "fallback" else ["é", "€"]
        space, decoder = "▁", decoders.Metaspace()
        if kind == "fallback":
            decoder = decoders.Sequence([
                decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                decoders.Strip(" ", 1, 0)])
    texts = _texts(space, pieces)
    model = tokenizers.models.BPE({text: i for i, text in enumerate(texts)}, [], byte_fallback=True)
    made = tokenizers.Tokenizer(model)
    made.decoder = decoder
    if kind == "bytes":
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        made.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    made.add_special_tokens(list(SPECIAL.values()))
    directory.mkdir(parents=True, exist_ok=True)
    made.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<eos>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(directory)
