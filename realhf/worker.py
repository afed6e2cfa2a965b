"""One worker: the only process of a run, or one of torchrun's."""

import ctypes
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from realhf.dist.group import PeerError, World
from realhf.errors import UserError
from realhf.profiling.measure import measure
from realhf.runtime.trainer import Trainer

if TYPE_CHECKING:
    from realhf.cli import Job

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_GRACE_SECONDS = 3.0  # A worker that lost a peer waits so long, so that the peer's own sentence comes first.


def work(job: "Job") -> int:
    """Trains; gives the exit code."""
    return _serve(_train, job)


def profile(job: "Job") -> int:
    """Measures the machine; gives the exit code."""
    return _serve(_measure, job)


def _train(job: "Job", world: World) -> None:
    plans = world.control.all_gather_json(job.program.plan.to_dict())
    if different := [rank for rank, plan in enumerate(plans) if plan != plans[0]]:
        hint = "write one with `realhf plan -o plan.yaml` and give it to all by --plan"
        raise UserError(f"ranks 0 and {different[0]} have different plans: {hint}")
    out = job.out or Path("runs") / time.strftime("run-%Y%m%d-%H%M%S")
    out = Path(world.control.all_gather_json(str(out))[0])  # As rank 0 has it.
    out.mkdir(parents=True, exist_ok=True)
    Trainer(job.program, world, out=out).run()


def _measure(job: "Job", world: World) -> None:
    measured = measure(world, job.program)
    if world.rank == 0 and job.out is not None:
        measured.save(job.out)
        print(f"realhf: wrote {job.out}", file=sys.stderr)


def _serve(task: Callable[["Job", World], None], job: "Job") -> int:
    """Does the task; the exit code is 2 for what the user can mend, 1 for anything else that went wrong."""
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    numbers = [int(os.environ[name]) for name in names] if under_torchrun else [0, 1, 0, 1]
    rank, size, local, per_host = numbers
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    _keep_freed_memory()
    try:
        world = World.from_torchrun(
            rank=rank, size=size, local_rank=local, ranks_per_host=per_host,
            timeout_seconds=job.timeout_seconds,
        )  # fmt: skip
        task(job, world)
    except UserError as error:
        sentence, code = f"realhf: {error}", 2
    except PeerError as error:
        time.sleep(_GRACE_SECONDS)
        sentence, code = f"realhf: rank {rank} stops: {error}", 1
    except KeyboardInterrupt:
        if size > 1:  # The launcher says so.
            os._exit(1)
        raise
    except Exception:
        sentence, code = traceback.format_exc(), 1
    else:
        return 0
    print(sentence, file=sys.stderr, flush=True)
    if size > 1:  # Peers may wait for this process: leave at once, without destructors that wait for them.
        os._exit(code)
    return code


def _keep_freed_memory() -> None:
    """Makes glibc keep freed blocks for the next tensors: to write on fresh pages takes ten times as long."""
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            mallopt(option, 2**31 - 1)
