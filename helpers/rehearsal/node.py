"""One node of a rehearsal: torchrun, without its own traceback where a rank has failed."""

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

if __name__ == "__main__":
    try:
        torchrun(sys.argv[1:])
    except (ChildFailedError, SignalException):
        sys.exit(1)  # the ranks have printed why, or another node's have
