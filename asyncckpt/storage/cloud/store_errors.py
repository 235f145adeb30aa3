"""What obstore raises, as `Store` says: errors of the operating system, with the store's own words."""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator

from asyncckpt.storage.store import UnsupportedByStoreError

_QUERY = re.compile(r"\?[^\s\"')]*")
"""Of URLs in texts of errors: a signature may be in it."""

MAX_CHARS = 600

_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
"""Codes of S3 and GCS, and of Azure."""


@contextlib.contextmanager
def translated(name: str) -> Iterator[None]:
    """Raise what obstore raises as `Store` says."""
    from obstore import exceptions

    try:
        yield
    except FileNotFoundError as error:
        text = words_of(error)
        no_bucket = any(code in text for code in _NO_BUCKET)
        raise FileNotFoundError(errno.ENOENT, text if no_bucket else "there is no such object", name) from None
    except OSError as error:
        if error.errno is not None:
            raise
        raise OSError(errno.EREMOTEIO, words_of(error), name) from None  # what an upload raises
    except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
        raise FileExistsError(errno.EEXIST, "the name is taken, or the object was changed", name) from None
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise PermissionError(errno.EACCES, words_of(error), name) from None
    except exceptions.NotSupportedError as error:
        raise UnsupportedByStoreError(words_of(error), name) from None
    except (exceptions.BaseError, ValueError) as error:
        raise OSError(errno.EREMOTEIO, words_of(error), name) from None


def words_of(error: BaseException) -> str:
    """Return the store's own words, without what may be secret."""
    said = str(error).partition("\n\nDebug source")[0]
    return _QUERY.sub("?...", " ".join(said.split()))[:MAX_CHARS]
