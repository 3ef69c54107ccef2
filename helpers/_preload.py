"""Imported once by the forkserver, so that the ranks it forks find their imports done.

A ``torch.optim`` constructor imports torch._dynamo, which takes as long as torch itself: it belongs here too.
"""

import atexit
import os
import shutil

import torch._dynamo
import torch.nn.parallel
import torch.optim
import torch.utils.data  # noqa: F401

import helpers._rank  # noqa: F401

# A killed kernel cannot tidy up. The forkserver outlives it by a moment, long enough to remove what it left.
atexit.register(shutil.rmtree, os.environ["WORLD_SIZE_ONE_FOLDER"], ignore_errors=True)
