"""`paravt train` in a process of its own that stops, as with Ctrl-C, when the process that started it is gone.

python -m paravt_ray.paradox.child PARENT_PID CONFIG.yaml key=value ...
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(arguments: list[str]) -> int:
    """Train; the exit code is that of `paravt train`."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits it ignored
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
    if os.getppid() != int(arguments[0]):  # it was gone before it could be watched
        return 130
    from paravt_ray import cli

    return cli.main(["train", *arguments[1:]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
