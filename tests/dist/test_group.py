"""Tests of the threads that carry the messages of groups."""

import os
from pathlib import Path


def _policies(world):
    """Return the scheduling policies of gloo's threads and of this one."""
    world.control.barrier()
    tasks = [int(task.name) for task in Path("/proc/self/task").iterdir()]
    names = {task: Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in tasks}
    gloo = [os.sched_getscheduler(task) for task, name in names.items() if name.startswith("gloo")]
    return gloo, os.sched_getscheduler(0)


def test_threads_of_gloo_do_not_interrupt_computation(pool):
    for gloo, own in pool.run(_policies):
        assert set(gloo) == {os.SCHED_BATCH}
        assert own == os.SCHED_OTHER
