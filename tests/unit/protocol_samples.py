"""One valid example of every message, and a request as it lies in a slot."""

from __future__ import annotations

from asyncckpt.errors import CommitTimeoutError, SaveFailedError, to_wire
from asyncckpt.protocol import messages as m
from asyncckpt.protocol import relay as r
from asyncckpt.protocol.request import PartRange, SaveRequest
from asyncckpt.protocol.samples import encode_samples

SAVE_ID = "000003-00000014-0123456789ab"
HEX = "0123456789abcdef"
KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
MESSAGES: tuple[m.Message, ...] = (
    m.Hello(id=1, session=HEX, replaces="", package="0.1.0", pid=4242, pid_start=987654, rank=0, world_size=1),
    m.Allocate(id=2, nbytes=1 << 30, populate=True),
    m.Adopt(id=17, fd=9, nbytes=1 << 30, token=b"t" * 16, generation=4, ended=3, committed=SAVE_ID),
    m.Release(id=3, slot=1),
    m.Lead(id=15, run=HEX[:12], port=0, server_secret="", client_public=KEY),
    m.Follow(
        id=16,
        run=HEX[:12],
        address="tcp://127.0.0.1:7000",
        server_public=KEY,
        client_public=KEY,
        client_secret=KEY,
        attempt=1,
        timeout_s=15.0,
    ),
    m.Lineage(id=4, run=HEX[:12], path="/runs/a/step-300"),
    m.Begin(
        id=5,
        save_id=SAVE_ID,
        step=-1,
        path="/runs/\u00e4",
        slot=1,
        generation=1,
        nbytes=4096,
        umask=0o022,
        fsync=True,
        overwrite=False,
        commit_timeout_s=1800.0,
    ),
    m.Submit(id=6, save_id=SAVE_ID, slot=1, generation=1),
    m.Withdraw(id=7, save_id=SAVE_ID, reason="the copy failed", skipped=False),
    m.Consent(id=12, save_id=SAVE_ID, granted=False, reason="the loss is NaN"),
    m.Share(id=13, board="plan-7", offset=0, total=5, data=b"bytes"),
    m.Fetch(id=14, board="plan-7", rank=1, offset=0),
    m.Recall(id=17, path="/runs/a", hold=True),
    m.Heartbeat(id=8, saves=(SAVE_ID,)),
    m.Goodbye(id=9),
    m.Status(id=10),
    m.Drain(id=11, now=False),
    m.Welcome(id=1, package="0.1.0", pid=1, pid_start=2, instance=HEX, heartbeat_s=0.5),
    m.Granted(id=2, slot=1, fd=17, nbytes=1 << 30, token=bytes(range(16))),
    m.Leading(id=15, address="tcp://[::1]:7000", server_public=KEY, server_secret=KEY),
    m.Following(id=16, leader=HEX),
    m.LineageFound(id=4, epoch=3),
    m.Fetched(id=14, missing=(), total=5, data=b"bytes"),
    m.Recalled(
        id=17,
        parts=(
            {
                "save_id": SAVE_ID,
                "step": -1,
                "path": "/runs/a/step-300",
                "rank": 1,
                "world_size": 2,
                "whole": True,
                "committed": False,
                "slot": 3,
                "fd": 17,
                "nbytes": 1 << 30,
                "token": bytes(range(16)),
                "generation": 4,
                "inode": 131073,
                "birth_ns": 1_700_000_000_000_000_001,
            },
        ),
    ),
    m.Ok(id=5),
    m.Refused(id=6, error=to_wire(SaveFailedError("disk full", code="ENOSPC", rank=0))),
    m.Saves(
        id=0,
        saves=(
            {"save_id": SAVE_ID, "phase": "committed", "report": {"nbytes": 7, "seconds_write": 0.5, "direct": True}},
            {"save_id": SAVE_ID, "phase": "failed", "error": to_wire(CommitTimeoutError("late", missing_ranks=[1]))},
            {"save_id": SAVE_ID, "phase": "durable", "report": {}, "missing": [1, 3]},
        ),
        changes=2,
        leader=HEX,
    ),
    m.StatusReport(id=10, report={"sessions": [], "draining": False}),
)
BETWEEN_WORKERS: tuple[m.Message, ...] = (
    r.Piece(stream=HEX, sender=HEX, number=1, first=1, more=False, data=b"record", taken=0),
    r.Waits(stream=HEX, saves=({"save_id": SAVE_ID, "phase": "submitted", "missing": [3]},)),
    r.Unlinked(stream=HEX, sender=HEX),
    r.Joined(rank=1, world_size=2, attempt=1, opened=1),
    r.Left(rank=1, why="its process 7 died"),
    r.Asked(rank=1, path="/runs/a/step-300"),
    r.Begun(
        save_id=SAVE_ID,
        rank=1,
        step=300,
        path="/runs/a",
        nbytes=1,
        umask=0o022,
        overwrite=False,
        commit_timeout_s=1800.0,
    ),
    r.Ringed(save_id=SAVE_ID, rank=1, writing=True),
    r.Sealed(save_id=SAVE_ID, rank=1, request=b"request"),
    r.Delivered(save_id=SAVE_ID, rank=1, result={"index_name": "x"}, report={"nbytes": 7}),
    r.GaveUp(save_id=SAVE_ID, outcome="failed", error=to_wire(SaveFailedError("disk full", code="ENOSPC"))),
    r.Declined(save_id=SAVE_ID, rank=1, reason="the copy failed", skipped=False),
    r.Consented(save_id=SAVE_ID, rank=1, granted=True, reason=""),
    r.EpochFound(path="/runs/a", epoch=3, error={}),
    r.Ended(save_id=SAVE_ID, outcome="committed", error={}, report={"seconds_commit": 0.5}),
    r.Changed(data=b"change"),
)
BODY_END = 1 << 20
REQUEST = SaveRequest(
    save_id=SAVE_ID,
    step=300,
    path="/runs/a/step-300",
    rank=0,
    world_size=2,
    parts=(PartRange(offset=4096, nbytes=5000), PartRange(offset=12288, nbytes=4096)),
    structure=b"structure",
    objects=b"objects",
    n_tensors=3,
    metadata='{"loss": 0.5}',
    fsync=True,
    overwrite=False,
    umask=0o022,
    write_threads=0,
    package="0.1.0",
    commit_timeout_s=1800.0,
    hook_timeout_s=0,
    plan=HEX,
    samples=encode_samples([("model.weight", True, b"8 bytes!"), ("model.bias", False, bytes(8))]),
    contribution=b"opaque",
)
