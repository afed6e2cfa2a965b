"""Valid inputs, small enough to be read in milliseconds, that `benchmarks/fuzz/inputs.py` damages."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import yaml

from realhf.checkpoint.run_state import FORMAT
from realhf.checkpoint.tensor_files import pack_header

_REPO = Path(__file__).parents[2]
_CHARACTERS = "0123456789+= abcdefghijklmnopqrstuvwxyz"
_VOCABULARY = {token: i for i, token in enumerate(("<pad>", "<eos>", *_CHARACTERS))}

TOKENIZER: dict[str, Any] = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": {"type": "Split", "pattern": {"Regex": ""}, "behavior": "Isolated", "invert": False},
    "post_processor": None, "decoder": None,
    "model": {"type": "WordLevel", "vocab": _VOCABULARY, "unk_token": "<pad>"},
}
"""A tokenizer.json with one token per character."""
TOKENIZER_CONFIG: dict[str, Any] = {
    "eos_token": "<eos>", "pad_token": "<pad>",
    "chat_template": "{% for message in messages %}{{ message.role }}{{ message.content }}{% endfor %}",
}
TOKENIZERS: list[Any] = [
    TOKENIZER,
    {**TOKENIZER, "post_processor": {
        "type": "TemplateProcessing", "pair": [], "single": [
            {"SpecialToken": {"id": "<eos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"<eos>": {"id": "<eos>", "ids": [1], "tokens": ["<eos>"]}}}},
    {**TOKENIZER, "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    {**TOKENIZER, "normalizer": {"type": "Replace", "pattern": {"Regex": "(a*)*$"}, "content": "b"},
     "padding": {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                 "pad_type_id": 0, "pad_token": "<pad>"},
     "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 1}},
    {**TOKENIZER, "model": {"type": "Unigram", "unk_id": 0, "byte_fallback": False,
                            "vocab": [[token, -1.0] for token in _VOCABULARY]}},
    {**TOKENIZER, "model": {"type": "BPE", "vocab": _VOCABULARY, "merges": [], "unk_token": "<pad>"}},
]
TEMPLATES = [
    TOKENIZER_CONFIG["chat_template"],
    "{%- set ns = namespace(x='') %}{% for m in messages %}{% set ns.x = ns.x + m['content'] %}{% endfor %}"
    "{{ bos_token }}{{ ns.x | trim }}{% if add_generation_prompt %}>{% endif %}{{ tools | tojson }}",
    "{% macro f(x) %}{{ x[0].role }}{% endmacro %}{{ f(messages) }}{{ strftime_now('%Y') }}{{ 2 ** 5 }}",
]
BOMBS = [
    "{{ 'a' * 10 ** 11 }}", "{{ 'a' * 10 ** 8 }}", "{{ [0] * 10 ** 10 }}", "{{ 9 ** 9 ** 9 }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ messages.__class__.__mro__ }}",
    "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
    "{{ '%999999999d' | format(1) }}", "{% include '/etc/passwd' %}", "{{ raise_exception('\x1b[2J') }}",
    "{{ '\\ud800' }}", "{{ messages | tojson(indent=99999) }}", "{{ 'x' | indent(10 ** 10) }}",
]
"""Chat templates without an end, or with much to write."""
MODEL: dict[str, Any] = {
    **json.loads((_REPO / "models/tiny.json").read_text()), "vocab_size": len(_VOCABULARY),
}
ROWS: list[dict[str, Any]] = [
    {"prompt": "1+2=", "completion": "3", "answer": "3"},
    {"prompt": [{"role": "user", "content": "4+5="}], "completion": [{"role": "assistant", "content": "9"}],
     "answer": "9", "more": {"a": [1, None]}},
    {"prompt": "7+8=", "completion": "15", "answer": "15"},
]


def _cluster(name: str) -> Any:
    return yaml.safe_load((_REPO / f"plans/clusters/{name}.yaml").read_text())


CLUSTERS = [_cluster("cpu-laptop"), _cluster("h100-2x8")]
CLUSTERS[1]["peak_flops"]["float64"] = "34 TFLOP/s"
_OPTIMIZER = {
    "()": "OptimizerConfig", "lr": 1e-3, "betas": [0.9, 0.99], "warmup_steps": 2, "total_steps": 5,
}
_ROLE = {"()": "Role", "model": "{dir}", "dtype": "float64", "optimizer": _OPTIMIZER, "random_init": True}
EXPERIMENT: dict[str, Any] = {
    "()": "GRPO",
    "actor": {**_ROLE, "lora": {"()": "LoraConfig", "rank": 4, "alpha": 8.0, "export_merged": True}},
    "dataset": {"()": "DatasetConfig", "path": "{dir}/data.jsonl", "max_prompt_tokens": 64},
    "eval_dataset": {"()": "DatasetConfig", "path": "{dir}/data.jsonl", "max_prompt_tokens": 64,
                     "max_rows": 2, "shuffle": False},
    "reward_function": "=reward",
    "sampling": {"()": "SamplingConfig", "max_new_tokens": 7, "temperature": 0.9, "top_k": 3, "top_p": 0.9},
    "loss": {"()": "PolicyLossConfig", "kl_coef": 0.05, "clip_low": 0.2, "average": "token"},
    "expected": {"()": "Expected", "prompt_tokens": 4, "response_tokens": 5, "host_seconds": 0.1},
    "steps": 3, "batch_size": 8, "group_size": 4, "minibatches": 2, "epochs": 1, "seed": 1, "eval_every": 2,
    "checkpoint_every": 10, "keep_checkpoints": 2, "kv_cache_gib": 0.5, "max_rows": 64,
    "prefill_tokens": 128, "router_aux_loss_coef": 0.0, "tokenizer": "{dir}",
}
CLASSES = ("GRPO", "SFT", "Role", "OptimizerConfig", "LoraConfig", "DatasetConfig", "SamplingConfig",
           "PolicyLossConfig", "Expected")
SFT: dict[str, Any] = {
    "()": "SFT", "actor": _ROLE, "dataset": EXPERIMENT["dataset"], "steps": 3, "batch_size": 4,
}
PLANS: list[Any] = [
    {"calls": {
        "actor_generate": {"layout": "d4@0-3", "max_rows": 8},
        "reward_forward": {"layout": "d2@0-1"},
        "ref_forward": {"layout": "t2@2-3", "offload": False, "micro_batch_tokens": 512},
        "advantages": {"layout": "d1@0"},
        "actor_train": {"layout": "d2t2@0-3", "micro_batch_tokens": 4096, "recompute": True,
                        "predicted": {"seconds": 0.5}},
        "eval_record": {"layout": "d1@0"},
    }, "predicted": {"step_seconds": 1.0}},
    {"calls": {name: {"layout": "d1@0"} for name in (
        "actor_generate", "reward_forward", "ref_forward", "advantages", "actor_train")}},
]
LAYOUTS = ["d2t4p1@0-7", "t2@0,3", "d2@0-1", "p2d2c2t2e2@0-15", "d1@0", "t2@4-5"]
PROFILE: dict[str, Any] = yaml.safe_load((_REPO / "tests/planner/sample_profile.yaml").read_text())
PROFILE["cluster"].update(num_hosts=1, peak_flops={"float64": 40e9, "float32": 89e9})
PROFILE["models"][0]["dtype"] = "float64"  # The tables then apply to the experiment above.
PROFILE["models"][0]["shape"]["vocab_size"] = len(_VOCABULARY)


def _small(name: str) -> dict[str, Any]:
    """Return a shipped config with few layers and experts."""
    config = json.loads((_REPO / f"models/{name}.json").read_text())
    fewer = {"num_hidden_layers": 4, "n_layer": 4, "n_routed_experts": 16, "num_experts": 16, "n_group": 2,
             "topk_group": 1, "num_experts_per_tok": 2}
    config |= {key: value for key, value in fewer.items() if key in config}
    for key in ("layer_types", "no_rope_layers"):
        if isinstance(config.get(key), list):
            config[key] = config[key][:4]
    return config


CONFIGS = [MODEL, *map(_small, (
    "llama-3.1-8b", "gemma-2-2b", "gemma-3-1b", "gpt2", "deepseek-v3", "qwen3-30b-a3b", "qwen1.5-moe-a2.7b",
    "mixtral-8x7b", "phi-4-mini", "olmo-2-7b", "granite-3.3-8b", "smollm3-3b", "glm-4-9b",
))]
GENERATION: dict[str, Any] = {"eos_token_id": [1, 2], "temperature": 0.6, "max_length": 10, "do_sample": True}
METRICS = b'{"step": 3, "reward/mean": 0.5}\n'
RANK_FILE = "rank_00000.safetensors"
TENSOR_BYTES = 2 * 4 * 2 * 4
_PIECE = [RANK_FILE, [[0, 4], [0, 2]]]
_NAMES = [f"actor/{kind}/model.norm.weight[0:4,0:2]" for kind in ("master", "exp_avg")]
TENSORS = pack_header([(name, "F32", (4, 2)) for name in _NAMES])[0] + bytes(TENSOR_BYTES)
"""The tensors of a checkpoint with the piece of two kinds."""
MANIFEST: dict[str, Any] = {
    "step": 3, "num_ranks": 1, "experiment": {"steps": 5}, "plan": {"calls": {}},
    "files": {
        name: {"num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in {"metrics.jsonl": METRICS, RANK_FILE: TENSORS}.items()
    },
    "sets": {"actor": {"kinds": ["master", "exp_avg"], "pieces": {"model.norm.weight": [_PIECE]},
                       "num_steps": 3, "num_skipped": 0, "model": {"hidden_size": 2}}},
    "versions": {"actor": 3}, "run": {"number": 3}, "ranks": [{"a": 1}], "format": FORMAT,
}


def _parquet() -> bytes:
    sink = pyarrow.BufferOutputStream()
    rows = [{key: row[key] for key in ("prompt", "completion")} for row in (ROWS[0], ROWS[2])]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows * 20), sink, row_group_size=20)
    return sink.getvalue().to_pybytes()


PARQUET = _parquet()
