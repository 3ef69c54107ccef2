"""A chapter's script as a module, and a device that works through a queue, for tests of the script's functions.

It imports little, because the ranks of these tests import it, too.
"""

import importlib.util

import torch


def loaded(path):
    """The script as a module. ``path`` may be text, which can be sent to ranks."""
    spec = importlib.util.spec_from_file_location("script", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Device:
    """A device with a queue, and the host's clock. A step takes a second; the host waits for it only in ``wait``."""

    def __init__(self):
        self.queue = 0  # seconds of work that wait for the device
        self.now = 0.0

    def perf_counter(self):
        """So this object is also the module ``time`` of a script."""
        return self.now

    monotonic = perf_counter

    def step(self):
        self.queue += 1

    def wait(self, *arguments):
        """Until the queue is empty; return a number, as ``item()`` does."""
        self.now += self.queue
        self.queue = 0
        return 1.0

    item = synchronize = wait

    def isfinite(self):
        """The answer stays on the device, so the host does not wait."""
        return torch.tensor(True)

    def hour(self, *arguments):
        """The host is busy for an hour."""
        self.now += 3600
