"""Writes tiny chat models, of which nothing is trained yet, and rows, for the examples with environments."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<end>{% endif %}{% endfor %}"
_MODEL = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 48, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}, "max_position_embeddings": 256,
    "initializer_range": 0.1, "pad_token_id": 0, "eos_token_id": 1}


def write_model(
    directory: Path, characters: str, *, words: Sequence[str] = (), template: str = _TEMPLATE
) -> None:
    """Write a model's config, and a tokenizer whose tokens are characters, words, <pad> and <end>.

    Without a `template`, a chat is nothing but what is said, with <end> after each turn of the model.
    """
    from transformers import AddedToken, Qwen2Tokenizer

    # The tokenizer writes spaces and line breaks as other characters, as GPT-2's does.
    vocabulary = ["<pad>", "<end>", *characters.replace(" ", "\u0120").replace("\n", "\u010a")]
    tokenizer = Qwen2Tokenizer(
        {token: i for i, token in enumerate(vocabulary)}, merges=[], pad_token="<pad>", eos_token="<end>",
        unk_token="<pad>")
    tokenizer.add_tokens([AddedToken(word) for word in words])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    settings = _MODEL | {"vocab_size": len(vocabulary) + len(words)}
    (directory / "config.json").write_text(json.dumps(settings))


def write_rows(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write the rows of a data set."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
