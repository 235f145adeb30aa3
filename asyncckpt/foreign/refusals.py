"""Why a pickle is not read. Internal to reading: whoever asked gets an error of asyncckpt's."""

from __future__ import annotations

MAX_NBYTES = 1 << 30
"""Of one pickle, as far as it has to be held: long bytes that nobody looks into stay in their file. The metadata of
100,000 chunks take some 20 MB. Chosen, not measured."""


class UnpicklingError(ValueError):
    """No pickle that can be read. `name`: the global that is not on the list, if that is why."""

    def __init__(self, text: str, name: str | None = None) -> None:
        super().__init__(text)
        self.name = name


class TooLargeError(UnpicklingError):
    """`nbytes` of a pickle would have to be held."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(f"{nbytes} bytes of a pickle would have to be held, more than are read", "a large pickle")
