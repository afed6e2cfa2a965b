"""PPO of a 70B actor with the 7B critic of ppo_7b.py, to plan without weights or data.

    realhf plan examples/ppo_70b.py --cluster h100-8x8
"""

from dataclasses import replace

from ppo_7b import experiment as with_7b

experiment = replace(with_7b, actor=replace(with_7b.actor, model="llama-70b"))
