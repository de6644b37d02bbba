"""Ctrl-C between two steps, not within one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class SecondInterrupt(KeyboardInterrupt):
    """Ctrl-C for the second time: what is under way is left as it is."""


@contextmanager
def held_back() -> Iterator[None]:
    """A Ctrl-C within the block is delivered at its end, so that a step is taken whole or not at all.

    :raises SecondInterrupt: At once, at a second Ctrl-C.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    received: list[tuple[int, Any]] = []

    def receive(number: int, frame: Any) -> None:
        if received:
            raise SecondInterrupt
        received.append((number, frame))

    signal.signal(signal.SIGINT, receive)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if received:
        handler(*received[0])
