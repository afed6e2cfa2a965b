"""GRPO with LoRA: only the adapters are trained and moved, 4.5 % of the parameters. It needs runs/sft.

    realhf run examples/grpo_lora.py --plan grpo-4
"""

from dataclasses import replace

from grpo import experiment as full

from realhf import LoraConfig

actor = replace(
    full.actor,
    lora=LoraConfig(rank=2, alpha=4.0),
    optimizer=replace(full.actor.optimizer, lr=4e-3),
)
experiment = replace(full, actor=actor)
