"""Supervised fine-tuning of a tiny model on the searches of examples/pair_search.py.

    realhf run examples/long_chain_sft.py --out runs/long_chain_sft
"""

from pair_search import prepare

from realhf import SFT, DatasetConfig, OptimizerConfig, Role

task = prepare()
experiment = SFT(
    actor=Role(
        model=str(task / "model"),
        random_init=True,
        optimizer=OptimizerConfig(
            lr=5e-3, warmup_steps=20, schedule="cosine", total_steps=700, min_lr_ratio=0.1
        ),
    ),
    dataset=DatasetConfig(str(task / "sft.jsonl")),
    steps=700,
    batch_size=64,
    log_every=50,
)
