"""examples/long_chain.py without the cosine reward: only whether the answer is right counts.

    realhf run examples/long_chain_plain.py
"""

from dataclasses import replace

import long_chain

experiment = replace(long_chain.experiment, score_shaping=None)
