"""What a check of this machine came to."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

OK, WARN, FAIL = "ok", "warn", "fail"
STATUSES = (OK, WARN, FAIL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """See the module.

    Attributes:
        name: Of the check.
        status: `ok`; `warn`: it works, slower or with less than is promised; `fail`: saves or loads will fail.
        text: What was found, and what it means.
        advice: What to do; empty where nothing need be done.
        facts: The numbers, for programs.
    """

    name: str
    status: str
    text: str
    advice: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


def ok(name: str, text: str, **facts: Any) -> Finding:
    """Return a finding that all is well."""
    return Finding(name=name, status=OK, text=text, facts=facts)


def warn(name: str, text: str, advice: str, **facts: Any) -> Finding:
    """Return a finding that something is less than it could be."""
    return Finding(name=name, status=WARN, text=text, advice=advice, facts=facts)


def fail(name: str, text: str, advice: str, **facts: Any) -> Finding:
    """Return a finding that something will not work."""
    return Finding(name=name, status=FAIL, text=text, advice=advice, facts=facts)


def reason(error: OSError) -> str:
    """Return an error's name and text, without paths."""
    return f"{errno.errorcode.get(error.errno or 0, 'error')}: {error.strerror or error}"
