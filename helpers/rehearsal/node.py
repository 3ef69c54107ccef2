"""One node of a rehearsal: torchrun, but without torchrun's traceback where a rank has failed."""

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

if __name__ == "__main__":
    try:
        torchrun(sys.argv[1:])
    except (ChildFailedError, SignalException):
        sys.exit(1)  # a rank of this node or of another has printed the reason
