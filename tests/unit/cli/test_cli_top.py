"""Arguments of `asyncckpt top`, and Ctrl-C."""

from __future__ import annotations

import signal

import pytest

from asyncckpt.cli import main
from asyncckpt.cli.commands import top


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "1e10", "soon", ""])
def test_an_interval_that_nobody_can_wait_for_is_a_usage_error(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["top", f"--interval={text}"])
    assert raised.value.code == 2
    assert "expected seconds" in capsys.readouterr().err


def test_an_interrupt_in_the_middle_of_a_destructor_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    n_asked = 0

    def ask(_endpoint: str) -> None:
        nonlocal n_asked
        n_asked += 1
        assert n_asked == 1, "the interrupt was lost"
        Interrupted()

    monkeypatch.setattr(top, "_asked", ask)
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["top", "--interval", "0.1", "--endpoint", "ipc:///nowhere/w.sock"]) == 0
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, inherited)
