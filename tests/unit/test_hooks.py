"""Commit hooks: which are asked, what a veto is, and that `post_commit` can do no harm."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from asyncckpt.commit_hooks import HookRunner
from asyncckpt.components import CommitHook


class Refusing(CommitHook):
    def pre_commit(self, path: str, **kw: Any) -> None:
        raise RuntimeError(f"{path} {kw}")


class After(CommitHook):
    def post_commit(self, path: str, **kw: Any) -> None:
        raise SystemExit(3)


class Duck:
    def pre_commit(self, path: str, **kw: Any) -> None:
        """Agrees."""


@pytest.mark.parametrize(
    ("hook", "asks"), [(None, False), (CommitHook(), False), (After(), False), (Refusing(), True), (Duck(), True)]
)
def test_only_a_hook_with_a_pre_commit_of_its_own_is_asked(hook: Any, asks: bool) -> None:
    assert HookRunner(hook).asks is asks


def test_a_method_that_was_set_on_the_instance_counts() -> None:
    hook = CommitHook()
    hook.pre_commit = lambda path, **kw: 1 / 0  # type: ignore[method-assign,assignment]
    assert "ZeroDivisionError" in str(HookRunner(hook).before("/a", {}))


def test_whatever_pre_commit_raises_is_a_veto_with_its_text() -> None:
    assert HookRunner(Refusing()).before("/a", {"note": 1}) == "RuntimeError: /a {'note': 1}"
    assert HookRunner(Duck()).before("/a", {}) is None
    assert HookRunner(None).before("/a", {}) is None


def test_what_post_commit_raises_is_logged_only(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "asyncckpt"):
        HookRunner(After()).after("/a", {})
    assert "committed nevertheless" in caplog.text
