"""Checks of `asyncckpt doctor`, and their findings."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from asyncckpt.errors import AsyncCkptError

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result of a check.

    Attributes:
        name: Name of the check.
        status: `ok`; `warn`: works, but slower or with restrictions; `fail`: saves or loads will fail.
        text: The result, and its consequence.
        advice: What to do; empty if there is nothing to do.
        facts: Values for --json.
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
        name: Name in reports.
        run: Runs the check, and returns its finding, whose name is set later.
        failure: Text of the finding if the check raises.
        advice: Advice of the finding then.
        status: Status of the finding then.
    """

    name: str
    run: Callable[[], Finding]
    failure: str = "cannot be checked"
    advice: str = "check it by hand"
    status: str = FAIL


def findings_of(checks: Iterable[Check]) -> Iterator[Finding]:
    """Run checks, and yield their findings."""
    for check in checks:
        try:
            found = check.run()
        except (OSError, AsyncCkptError) as error:
            found = Finding(status=check.status, text=f"{check.failure}: {reason(error)}", advice=check.advice)
        yield replace(found, name=check.name)


def ok(text: str, **facts: Any) -> Finding:
    """Return a finding of status `ok`."""
    return Finding(status=OK, text=text, facts=facts)


def warn(text: str, advice: str, **facts: Any) -> Finding:
    """Return a finding of status `warn`: works, but slower or with restrictions."""
    return Finding(status=WARN, text=text, advice=advice, facts=facts)


def fail(text: str, advice: str, **facts: Any) -> Finding:
    """Return a finding of status `fail`: saves or loads will fail."""
    return Finding(status=FAIL, text=text, advice=advice, facts=facts)


def reason(error: Exception) -> str:
    """Return the errno's name and the text of an error, without paths."""
    code = errno.errorcode.get(getattr(error.__cause__ or error, "errno", None) or 0)
    text = getattr(error, "strerror", None) or str(error)
    return f"{code}: {text}" if code else text
