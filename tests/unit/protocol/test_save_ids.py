"""A save id is its text, whose parts are read by name."""

from __future__ import annotations

import copy
import pickle

import pytest

from asyncckpt.format.names import SaveId

RUN = "0123456789ab"
TEXT = f"000002-00000030-{RUN}"


def test_save_id_is_its_text_and_names_its_parts() -> None:
    save_id = SaveId(2, 30, RUN)
    assert save_id == TEXT and {save_id: 1}[TEXT] == 1
    assert (save_id.epoch, save_id.sequence, save_id.run_id) == (2, 30, RUN)
    assert save_id.with_parts(epoch=3) == SaveId(3, 30, RUN)
    assert save_id.with_parts(sequence=31, run_id="f" * 12) == SaveId(2, 31, "f" * 12)
    assert save_id.with_parts(epoch=3).call == save_id.call


def test_save_ids_are_ordered_by_epoch_then_sequence() -> None:
    ordered = [SaveId(1, 99, RUN), SaveId(2, 3, RUN), SaveId(2, 20, RUN), SaveId(10, 0, RUN)]
    assert sorted(reversed(ordered)) == ordered


def test_save_id_that_is_copied_or_pickled_is_the_same() -> None:
    save_id = SaveId(2, 30, RUN)
    for other in (copy.deepcopy(save_id), pickle.loads(pickle.dumps(save_id)), SaveId.parse(TEXT)):
        assert type(other) is SaveId and other == save_id
    assert SaveId.parse(save_id) is save_id


@pytest.mark.parametrize("text", ["", TEXT[1:], TEXT + "0", TEXT.upper(), f"2-30-{RUN}"])
def test_text_that_is_no_save_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a save id"):
        SaveId.parse(text)
