"""Directories with small tokenizers of the kinds that models have, made in code."""

import json
import tempfile
from functools import cache
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXTS = ("The sky is blue.", "The sky is black and green.", "one two three", "a blue sky, green")


@cache
def byte_tokenizer(special: tuple[str, ...], template: str | None, *, merges: bool = False) -> str:
    """Return a tokenizer of bytes, with merges like GPT-2's if wanted; eos is `<eos>`, and bos `<bos>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    if merges:
        trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(TEXTS * 9, trainer)
    return _saved(tokenizer, special, template=template, bos_token="<bos>", eos_token="<eos>")


@cache
def llama_tokenizer(*, closes: bool = False, template: str | None = None) -> str:
    """Return a tokenizer like Llama 2's: bos, a space before every text, and bytes for what it does not know.

    With `closes`, it ends every text with eos.
    """
    words = Tokenizer(models.BPE())
    words.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    words.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    words.train_from_iterator(TEXTS * 9, trainers.BpeTrainer(vocab_size=80, show_progress=False))
    learned = json.loads(words.to_str())["model"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *learned["vocab"]]
    merges = [tuple(merge) for merge in learned["merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = words.normalizer
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if closes else "<s> $A", special_tokens=[("<s>", 1), ("</s>", 2)])
    return _saved(tokenizer, (), template=template, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _saved(tokenizer: Tokenizer, special: tuple[str, ...], *, template: str | None, **named: str) -> str:
    from transformers import PreTrainedTokenizerFast  # Imported here, as it takes a second.

    directory = Path(tempfile.mkdtemp(prefix="tokenizer-"))
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
    whole.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    whole.chat_template = template
    whole.save_pretrained(directory)
    return str(directory)
