"""Writes docs/models.md from the tables that the code and the tests use: `python docs/models.py`."""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from realhf.families import FAMILIES  # noqa: E402
from realhf.model_config import HEADS, ROPE_KEYS, ModelConfig  # noqa: E402
from realhf.param_spec import model_spec  # noqa: E402
from realhf.shipped import shipped_dir  # noqa: E402
from tests.families import CASES, LAYOUTS, MOE_CASES, MOE_LAYOUTS  # noqa: E402

HEAD = """\
# Models

<!-- Written by `python docs/models.py` from realhf/families.py, tests/families.py and models/. -->

A model is a Hugging Face directory, in and out: causal language models, and the sequence classification
models of the same families with one label (reward models, critics). transformers has no such class for
{without}: critics and reward models of these are not trained, as nothing could open them.

Of each row a tiny random model, made by transformers' own class, is compared in float32 under all of its
layouts (tests/test_families.py): logits within 1e-5, gradients within 1e-4 of each tensor's largest entry, 64
tokens of greedy generation identical, and the tensors of a directory that was read and written again byte for
byte the same (`make test-families`). To add a family, see [adding-a-model.md](adding-a-model.md). Families
without a row train as they are, in whole replicas, with transformers' own classes: `engine="transformers"`
([how](adding-a-model.md#without-a-table); tested with Phi, GPT-NeoX, OPT, Mamba and Mixtral).

"""
NOTES = """\

Rotary embeddings: {ropes}. `dynamic` and `longrope` depend on the length of
a sequence; each sequence of a packed batch goes by its own. While a sequence grows past the boundary
(`original_max_position_embeddings` of longrope, `max_position_embeddings` of dynamic), the tokens before it
are sampled at the shorter sequence's frequencies: the log-probs of generation then differ from those that
training computes of the whole sequence.

What a config.json says of dropout is ignored: reinforcement learning needs the probabilities that sampling
had. Quantised checkpoints are refused. DeepSeek-V3's layer for predicting a second token is left out.
Gemma 3 is the text model (the 1B checkpoints): those published from 4B on are Gemma3ForConditionalGeneration,
with a vision tower, and are refused.

## Shipped configs

For planning without weights, `realhf plan` and `realhf realloc` take these names (parameters as published, a
tied head once, less the vision towers of Gemma 3 and the layer of DeepSeek-V3 that predicts a second token;
tests/test_shipped_models.py). A name brings no tokenizer: for an experiment with such a model, say how long
prompts are, in the file by `expected=Expected(prompt_tokens=512)` or on the command line by
`--expected.prompt-tokens 512`; `response_tokens`, too, where nothing is generated, else it is
`sampling.max_new_tokens` if it is left out.

"""


def families() -> list[str]:
    rows = ["| model | classes in transformers | layouts tested |", "|---|---|---|"]
    for cases, layouts in ((CASES, LAYOUTS), (MOE_CASES, (*LAYOUTS, *MOE_LAYOUTS))):
        for case in cases.values():
            family = FAMILIES[case.family]
            classes = ", ".join(filter(None, map(family.architecture, HEADS)))
            rows.append(f"| {case.about} | {classes} | {' '.join(layouts)} |")
    return rows


def shipped() -> list[str]:
    rows = ["| name | family | parameters | layers | hidden size |", "|---|---|---|---|---|"]
    for path in sorted(shipped_dir("models").iterdir()):
        config = ModelConfig.load(path.name.removesuffix(".json"))
        size = f"{model_spec(config).numel:,}"
        name = path.name.removesuffix(".json")
        rows.append(f"| `{name}` | {config.family} | {size} | {config.num_layers} | {config.hidden_size} |")
    return rows


def page() -> str:
    without = " and ".join(family.prefix for family in FAMILIES.values() if family.score_class is None)
    notes = NOTES.format(ropes=", ".join(ROPE_KEYS))
    return HEAD.format(without=without) + "\n".join([*families(), notes + "\n".join(shipped()), ""])


if __name__ == "__main__":
    (ROOT / "docs" / "models.md").write_text(page())
