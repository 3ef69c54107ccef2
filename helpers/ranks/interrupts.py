"""What a Ctrl-C does while ranks run: it waits for the end of a block, and it is shown as one line."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """A context that a Ctrl-C does not interrupt. KeyboardInterrupt is raised at its end, if there was a Ctrl-C.

    It protects what must not stop halfway, for example between the start of a process and the note of its number.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python interrupts the main thread alone, and no other thread may set signal handlers
        return
    was_interrupted = False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal was_interrupted
        was_interrupted = True

    old_handler = signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old_handler)
    if was_interrupted:
        raise KeyboardInterrupt


def show_in_one_line(interrupt: KeyboardInterrupt) -> None:
    """Let IPython show the interrupt of a call as one line, without the launcher's frames.

    IPython calls an exception's ``_render_traceback_``, if it has one, in place of formatting the traceback itself.
    """
    line = "KeyboardInterrupt: the call was interrupted, and its ranks are ended."
    interrupt._render_traceback_ = lambda: [line]  # type: ignore[attr-defined]
