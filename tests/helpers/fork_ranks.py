"""Starts ranks as copies of one process that has imported torch: on eight ranks that saves much time.

``python fork_ranks.py RANKS ARGUMENTS...`` runs pytest with these arguments on each of them.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import sys

import pytest

SHARED = ("sklearn.datasets", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp")
SHARED += ("torch.distributed.pipelining", "torch.distributed.tensor.parallel", "torch._dynamo", "steppe")


def main(ranks: int, arguments: list[str]) -> int:
    """Run pytest on each rank. As soon as one ends badly, end all."""
    for module in SHARED:
        importlib.import_module(module)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    gc.freeze()  # what is imported is not garbage: without this each rank would visit, and so copy, all of it
    children: list[int] = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.environ["RANK"] = str(rank)
            status = pytest.main(arguments)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        children.append(child)
    try:
        while children:
            child, status = os.wait()
            children.remove(child)
            if status != 0:
                return os.waitstatus_to_exitcode(status)
        return 0
    finally:
        for other in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(other, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
