"""Controls Python's cyclic garbage collector while many objects are made."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Disable the cyclic collector inside the block, if it is enabled.

    Code that makes some objects for each of 20,000 tensors would make it visit all objects of the training several
    times: that was a third of the time of a load, and two thirds of that of a first plan. None of the new objects form
    cycles.
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
    """Run the cyclic collector once, if it is enabled, after many objects were made that stay.

    Else it runs when objects are made next: 0.19 s with 20,000 tensors, in the `state_dict()` of the first save.
    """
    if gc.isenabled():
        gc.collect()
