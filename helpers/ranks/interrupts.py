"""What a Ctrl-C does while ranks run: it waits for the end of a block, and it is shown as one line."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """A context in which a Ctrl-C has no effect; one that came raises KeyboardInterrupt at the end of the context.

    It protects steps that must not stop halfway, such as the start of a process before its number is noted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python interrupts the main thread alone, and no other thread may set signal handlers
        return
    interrupts: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)

    old_handler = signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old_handler)
    if interrupts:
        raise KeyboardInterrupt


def show_in_one_line(interrupt: KeyboardInterrupt) -> None:
    """Let IPython show the interrupt of a call as one line, without the launcher's frames.

    IPython calls an exception's ``_render_traceback_``, if it has one, in place of formatting the traceback itself.
    """
    line = "KeyboardInterrupt: the call was interrupted, and its ranks are ended."
    interrupt._render_traceback_ = lambda: [line]  # type: ignore[attr-defined]
