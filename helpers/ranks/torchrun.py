"""A script on several ranks of this machine: torchrun in this process, and an end to all of it at Ctrl-C."""

import contextlib
import os
import shutil
import signal
import sys

import psutil


def stop_at_signals(folder):
    """From now on, Ctrl-C, SIGTERM and SIGHUP end what this process started, its folder and itself, with status 130.

    The handler raises nothing: torchrun and its imports have places where an exception is lost, or a new rank with it.
    """
    signals = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    signals = [number for number in signals if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores SIGHUP

    def stop(number, frame):
        for other in signals:
            signal.signal(other, signal.SIG_IGN)  # a second Ctrl-C would disturb this
        try:
            left = psutil.Process().children(recursive=True)
            for ending in (signal.SIGTERM, signal.SIGKILL):
                for process in left:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.send_signal(ending)
                    with contextlib.suppress(OSError):
                        os.killpg(process.pid, ending)  # torchrun gives each rank a group of its own
                left = psutil.wait_procs(left, timeout=3)[1]
            shutil.rmtree(folder, ignore_errors=True)
            os.write(2, b"Interrupted; all ranks are stopped.\n")  # print may be what was interrupted
        finally:
            os._exit(130)

    for number in signals:
        signal.signal(number, stop)


def run(script, nproc, flags):
    """Run the script at a path on ``nproc`` ranks, with torchrun's logs beside it; return the exit status, 0 or 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // nproc)))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")  # hosts may lack a name
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    # The store is at a port that the system picks, at an address without a name: --standalone asks for the host's.
    options = [f"--nproc-per-node={nproc}", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    options += ["--local-addr=127.0.0.1", f"--log-dir={script.parent}"]
    options += ["--signals-to-handle=SIGQUIT"]  # the others are for stop_at_signals
    try:
        torchrun([*options, str(script), *flags])
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        return 1
    return 0
