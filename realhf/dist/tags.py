"""Tags: what tells kinds of messages apart that two ranks may exchange over a control group at the same time.

Messages without a tag (0) are those that all ranks exchange together.
"""

RECORD = 1
"""Records of steps, on their way to rank 0."""
FIRST_INPUT = 2
"""Inputs of calls: each action of a program has its own tag, from here on."""
PROFILED = 1 << 20
"""Samples whose way the profile times."""
PROMPT = 1 << 21
"""Prompts that a replica has taken, told to its ranks."""
