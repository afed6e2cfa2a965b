"""Tags: they tell apart the messages that two ranks may exchange over a control group at the same time.

Messages that all ranks exchange together have tag 0.
"""

RECORD = 1
"""Records of steps, sent to rank 0."""
CHECKPOINT = 2
"""What a rank has written of a checkpoint, sent to rank 0."""
DECISION = 3
"""Rank 0's decision about what follows a step."""
CLOCK = 4
"""The time on a host, for rank 0."""
FIRST_INPUT = 5
"""Inputs of calls. Each action of a program has its own tag, numbered from here."""
ANSWERS = 1 << 19
"""Added to the tag of questions, the tag of the answers to them."""
PROFILED = 1 << 20
"""Samples that the profile sends to measure how long they take."""
PROMPT = 1 << 21
"""Prompts that a replica has taken, sent to its ranks."""
