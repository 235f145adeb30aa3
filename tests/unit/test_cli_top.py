"""Arguments of `asyncckpt top`."""

from __future__ import annotations

import pytest

from asyncckpt.cli import main


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "1e9", "soon", ""])
def test_an_interval_that_nobody_can_wait_for_is_a_usage_error(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["top", f"--interval={text}"])
    assert raised.value.code == 2
    assert "expected seconds" in capsys.readouterr().err
