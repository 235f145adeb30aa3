"""Translates exceptions of obstore into the OSErrors that `Store` documents."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterable, Iterator

from asyncckpt.storage.store import UnsupportedByStoreError

_QUERY = re.compile(r"\?[^\s\"')]*")
"""The query of a URL in an error text; it may contain a signature."""

_USER = re.compile(r"://[^\s/\"'()<>]*@")
"""User and password of a URL."""

_SECRET_ELEMENTS = re.compile(
    r"<(Token-0|AWSAccessKeyId|SignatureProvided|(?:StringToSign|CanonicalRequest)(?:Bytes)?)>.*?(</\1>|$)", re.DOTALL
)
"""Elements of S3's answers that repeat credentials, or what was signed with them."""

_SECRET_VARIABLE = re.compile(r"(AWS|AZURE|GOOGLE)_.*(KEY|SECRET|TOKEN|PASSWORD).*(?<!_FILE)", re.IGNORECASE)

_REFUSED = ("operation lacked the necessary privileges", "operation lacked valid authentication credentials")
"""What obstore says where the store answers 403 and 401."""

_MIN_CHARS = 2
"""A value of one character is no secret, and may be a digit of every address."""

_SHORT_CHARS = 8
"""A shorter value is replaced only where it is a word of its own; it may be a number or part of many words."""

MAX_CHARS = 600

_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
"""Codes of S3 and GCS, and of Azure."""


@contextlib.contextmanager
def as_os_errors(name: str, secrets: Iterable[str] = ()) -> Iterator[None]:
    """Translate exceptions of obstore in the `with` block into the OSErrors that `Store` documents.

    Args:
        name: The object or prefix of the request.
        secrets: As of `message_of`.
    """
    from obstore import exceptions

    try:
        yield
    except FileNotFoundError as error:
        text = message_of(error, secrets)
        no_bucket = any(code in text for code in _NO_BUCKET)
        raise FileNotFoundError(errno.ENOENT, text if no_bucket else "there is no such object", name) from None
    except OSError as error:
        if error.errno is not None:
            raise
        # What an upload raises. One of a single part raises this also where others raise PermissionDeniedError.
        if any(words in str(error) for words in _REFUSED):
            raise PermissionError(errno.EACCES, message_of(error, secrets), name) from None
        raise OSError(errno.EREMOTEIO, message_of(error, secrets), name) from None
    except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
        raise FileExistsError(errno.EEXIST, "the name is taken, or the object was changed", name) from None
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise PermissionError(errno.EACCES, message_of(error, secrets), name) from None
    except exceptions.NotSupportedError as error:
        raise UnsupportedByStoreError(message_of(error, secrets), name) from None
    except (exceptions.BaseError, ValueError) as error:
        raise OSError(errno.EREMOTEIO, message_of(error, secrets), name) from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of no module that can be imported
            raise
        raise OSError(errno.EREMOTEIO, f"an error in obstore: {message_of(error, secrets)}", name) from None


def message_of(error: BaseException, secrets: Iterable[str] = ()) -> str:
    """Return the store's own message, without what may be secret.

    Args:
        error: An exception of obstore.
        secrets: Values that are replaced, besides those of the environment's variables for credentials.
    """
    text = str(error).partition("\n\nDebug source")[0]
    variables = (value for name, value in os.environ.items() if _SECRET_VARIABLE.fullmatch(name))
    for value in sorted({*secrets, *variables}, key=len, reverse=True):
        if len(value) >= _MIN_CHARS:
            pattern = re.escape(value)
            text = re.sub(pattern if len(value) >= _SHORT_CHARS else rf"(?<!\w){pattern}(?!\w)", "...", text)
    text = _SECRET_ELEMENTS.sub(r"<\1>...\2", text)
    return _QUERY.sub("?...", _USER.sub("://...@", " ".join(text.split())))[:MAX_CHARS]
