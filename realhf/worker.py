"""One worker: the only process of a run, or one of torchrun's."""

import ctypes
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from realhf.dist.group import PeerError, World
from realhf.errors import UserError
from realhf.runtime.trainer import Trainer

if TYPE_CHECKING:
    from realhf.cli import Job

_TIMEOUT_SECONDS = 600.0
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_GRACE_SECONDS = 3.0
"""A worker that lost a peer waits so long before it speaks, so that the peer's own sentence comes first."""


def work(job: "Job") -> int:
    """Runs the job; the exit code is 2 for what the user can mend, 1 for anything else that went wrong."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    _keep_freed_memory()
    try:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        world = World.from_torchrun(
            rank=rank, size=size, local_rank=local_rank, timeout_seconds=_TIMEOUT_SECONDS
        )
        out = _agree_on(job.out, world)
        Trainer(job.program, world, out=out).run()
    except UserError as error:
        return _stop(f"realhf: {error}", code=2, alone=size == 1)
    except PeerError as error:
        time.sleep(_GRACE_SECONDS)
        return _stop(f"realhf: rank {rank} stops: {error}", code=1, alone=size == 1)
    except KeyboardInterrupt:
        if size > 1:  # The launcher says so.
            os._exit(1)
        raise
    except Exception:
        return _stop(traceback.format_exc(), code=1, alone=size == 1)
    return 0


def _keep_freed_memory() -> None:
    """Makes glibc keep freed blocks for the next tensors: to write on fresh pages takes ten times as long."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            mallopt(option, 2**31 - 1)


def _agree_on(out: Path | None, world: World) -> Path:
    """Rank 0's run directory, created; under torchrun without --out rank 0 chooses it."""
    if out is None:
        out = Path("runs") / time.strftime("run-%Y%m%d-%H%M%S")
    out = Path(world.control.all_gather_json(str(out))[0])
    out.mkdir(parents=True, exist_ok=True)
    return out


def _stop(sentence: str, *, code: int, alone: bool) -> int:
    print(sentence, file=sys.stderr, flush=True)
    if not alone:
        # Peers may be waiting for this process: leave at once, without destructors that would wait for them.
        os._exit(code)
    return code
