"""What a Ctrl-C does while ranks run: it waits for the end of a block, and it is shown as one line."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay a Ctrl-C until the end of the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[bool] = []
    handler = signal.signal(signal.SIGINT, lambda *_: pending.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if pending:
        raise KeyboardInterrupt


def show_in_one_line(interrupt: KeyboardInterrupt) -> None:
    """Let IPython show the interrupt of a call as one line, without the launcher's frames."""
    interrupt._render_traceback_ = lambda: ["KeyboardInterrupt: the call was interrupted, and its ranks are ended."]  # type: ignore[attr-defined]
