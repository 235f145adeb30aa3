"""Runs the user's commit hooks: `pre_commit` may veto, `post_commit` may not."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from asyncckpt.basics.failpoints import reach
from asyncckpt.components import CommitHook
from asyncckpt.errors import ConfigError

_log = logging.getLogger("asyncckpt")


class HookRunner:
    """Calls the methods that a hook defines.

    Args:
        hook: A `CommitHook`, or any object with one or both of its methods; None: no hook.

    Raises:
        ConfigError: `hook` is something else.
    """

    def __init__(self, hook: Any | None) -> None:
        self._pre = _own_method(hook, "pre_commit")
        self._post = _own_method(hook, "post_commit")
        if self._pre is None and self._post is None and hook is not None and not isinstance(hook, CommitHook):
            raise ConfigError(
                f"commit_hook={hook!r}: expected a CommitHook, or an object with a method pre_commit(path, **kw) or "
                "post_commit(path, **kw)",
                field="commit_hook",
                value=repr(hook)[:80],
            )

    @property
    def asks(self) -> bool:
        """Whether a commit must wait for `before`."""
        return self._pre is not None

    def before(self, path: str, extra: Mapping[str, Any]) -> str | None:
        """Call `pre_commit`; return its error, which is a veto, as text, or None."""
        if self._pre is None:
            return None
        try:
            reach("hook: called before the commit")
            self._pre(path, **extra)
        except BaseException as error:
            _log.warning("pre_commit vetoes the commit of %s: %r", path, error)
            return f"{type(error).__name__}: {error}"
        return None

    def after(self, path: str, extra: Mapping[str, Any]) -> None:
        """Call `post_commit`; log its error."""
        if self._post is None:
            return
        try:
            self._post(path, **extra)
        except BaseException:
            _log.exception("post_commit of %s failed; the checkpoint is committed nevertheless", path)


def _own_method(hook: Any, name: str) -> Any:
    found = getattr(hook, name, None)
    return None if not callable(found) or getattr(found, "__func__", None) is getattr(CommitHook, name) else found
