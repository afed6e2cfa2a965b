"""Writes docs/models.md from the tables of the code and the tests: `python docs/models.py`."""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from realhf.models.families import FAMILIES  # noqa: E402
from realhf.models.model_config import HEADS, ROPE_KEYS, ModelConfig  # noqa: E402
from realhf.models.param_spec import model_spec  # noqa: E402
from realhf.user_input.shipped import shipped_dir  # noqa: E402
from tests.families import CASES, LAYOUTS, MOE_CASES, MOE_LAYOUTS  # noqa: E402

HEAD = """\
# Models

<!-- Written by `python docs/models.py` from realhf/models/families.py, tests/families.py and models/. -->

A model is a Hugging Face directory, in and out: causal language models, and the sequence classification
models of the same families with one label (reward models, critics). transformers has no such class for
{without}, so that no critics and reward models of these are trained: nothing could open them.

For each row, a test builds a tiny random model with transformers' own class and compares it in float32
under all of its layouts (tests/models/test_families.py): logits within 1e-5, gradients within 1e-4 of each
tensor's largest entry, 64 tokens of greedy generation identical, and the tensors of a directory that was
read and written again equal byte for byte (`make test-families`). To add a family, see
[adding-a-model.md](adding-a-model.md). Families without a row train in whole replicas with transformers'
own classes: `engine="transformers"` ([how](adding-a-model.md#without-a-table); tested with Phi, GPT-NeoX,
OPT, Mamba and Mixtral).

"""
NOTES = """\

Rotary embeddings: {ropes}. `dynamic` and `longrope` depend on the length of a sequence; each sequence of a
packed batch uses its own length. When a sequence grows past the boundary
(`original_max_position_embeddings` of longrope, `max_position_embeddings` of dynamic), the tokens before it
have been sampled at the shorter sequence's frequencies. The log-probs of generation then differ from those
that training computes for the whole sequence.

Dropout in a config.json is ignored, because reinforcement learning needs the probabilities of sampling.
Quantised checkpoints are refused. DeepSeek-V3's layer that predicts a second token is left out. Gemma 3 is
the text model (the 1B checkpoints): those published from 4B on are Gemma3ForConditionalGeneration, with a
vision tower, and are refused.

## Shipped configs

`realhf plan` and `realhf realloc` take these names, to plan without weights. The numbers of parameters are
those published, with a tied head counted once, and without the vision towers of Gemma 3 and the layer of
DeepSeek-V3 that predicts a second token (tests/models/test_shipped_models.py). A name has no tokenizer. For
an experiment with such a model, say how long prompts are: `expected=Expected(prompt_tokens=512)` in the file,
or `--expected.prompt-tokens 512` on the command line. If nothing is generated, give `response_tokens` as
well; otherwise its default is `sampling.max_new_tokens`.

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
