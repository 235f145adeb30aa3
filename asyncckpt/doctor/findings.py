"""A check of this machine or of a directory, and what it came to."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from asyncckpt.errors import AsyncCkptError

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What a check came to.

    Attributes:
        name: Of the check.
        status: `ok`; `warn`: it works, slower or with less than is promised; `fail`: saves or loads will fail.
        text: What was found, and what it means.
        advice: What to do; empty where nothing need be done.
        facts: The numbers, for programs.
    """

    name: str = ""
    status: str
    text: str
    advice: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        name: In reports.
        look: Does it; its finding need not have the name.
        failure: What it means that the system refuses a call of it.
        advice: What to do then.
        status: Of the finding then.
    """

    name: str
    look: Callable[[], Finding]
    failure: str = "cannot be looked at"
    advice: str = "look yourself"
    status: str = FAIL


def findings_of(checks: Iterable[Check]) -> Iterator[Finding]:
    """Do the checks in turn."""
    for check in checks:
        try:
            found = check.look()
        except (OSError, AsyncCkptError) as error:
            found = Finding(status=check.status, text=f"{check.failure}: {reason(error)}", advice=check.advice)
        yield replace(found, name=check.name)


def ok(text: str, **facts: Any) -> Finding:
    """Return a finding that all is well."""
    return Finding(status=OK, text=text, facts=facts)


def warn(text: str, advice: str, **facts: Any) -> Finding:
    """Return a finding that something is less than it could be."""
    return Finding(status=WARN, text=text, advice=advice, facts=facts)


def fail(text: str, advice: str, **facts: Any) -> Finding:
    """Return a finding that something will not work."""
    return Finding(status=FAIL, text=text, advice=advice, facts=facts)


def reason(error: Exception) -> str:
    """Return the name of the system's error, and the text without paths."""
    code = errno.errorcode.get(getattr(error.__cause__ or error, "errno", None) or 0)
    text = getattr(error, "strerror", None) or str(error)
    return f"{code}: {text}" if code else text
