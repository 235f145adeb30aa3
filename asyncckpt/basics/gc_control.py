"""Python's cyclic collector, kept from walking over and over what is being built."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Switch the cyclic collector off for a while, if it is on.

    What builds some objects for each of 20,000 tensors makes it walk all that a training holds, several times: a third
    of the time of a load, two thirds of a first plan's. Nothing that is built so has cycles.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def collect_garbage() -> None:
    """Let the cyclic collector walk everything once, if it is on, behind what has made many objects that stay.

    Else it does so when somebody makes some objects next: 0.19 s beside 20,000 tensors, in the `state_dict()` of the
    first save.
    """
    if gc.isenabled():
        gc.collect()
