"""The table of a rank's part in a save: phase x event -> phase, steps. The table is the program.

`SaveBook.advance` looks the cell up, changes the phase, and takes the steps in order; the later ones are left out once
one of them has ended the save. A cell that is not there is a bug of ours: it ends that save, and nothing else.

Events:

    begin           the rank has begun, or its slot is the first that is heard of it
    recover         the same, or it is known already: a dead worker may have written or committed it
    seal            its request was read, sealed
    prepared        the directory is made, and holds no manifest of this save
    written         its files and index are fsynced
    resume_open     the save was not committed; this rank has not sealed it
    resume_sealed   the save was not committed; this rank has sealed it
    commit, fail, abandon, lose
                    the save ends: committed, failed, abandoned, unknown

Steps:

    ADMIT           end the save if it cannot be: another at its path, a rank that is gone, ids that differ
    PREPARE         make the directory, and look for what stands in it
    COMPARE         once sealed, compare it with its session and the other ranks; with the last rank, all samples
    PROCEED         `prepared`, unless the directory is still being made
    STREAM          write what is filled so far, if the trainer streams
    WRITE           write the files, or take what was written before the seal was seen
    COMPLETE        commit, if all ranks are durable and consent
"""

from __future__ import annotations

from asyncckpt.protocol.save_phases import (
    ABANDONED,
    COMMITTED,
    DURABLE,
    FAILED,
    OPEN,
    RECOVERING,
    SEALED,
    UNKNOWN,
    WRITING,
)

NEW = ""
"""Before the first event."""

ADMIT, PREPARE, COMPARE, PROCEED = "admit", "prepare", "compare", "proceed"
STREAM, WRITE, COMPLETE = "stream", "write", "complete"

Cell = tuple[str, tuple[str, ...]]

TABLE: dict[str, dict[str, Cell]] = {
    NEW: {
        "begin": (OPEN, (ADMIT, PREPARE)),
        "seal": (SEALED, (ADMIT, COMPARE, PREPARE, PROCEED)),
        "recover": (RECOVERING, (PREPARE, ADMIT, COMPARE)),
        "commit": (COMMITTED, ()),
        "fail": (FAILED, ()),
    },
    OPEN: {
        "seal": (SEALED, (COMPARE, PROCEED)),
        "prepared": (OPEN, (STREAM,)),
        "written": (OPEN, ()),  # before its seal was seen
        "recover": (RECOVERING, ()),
        "commit": (FAILED, ()),  # by a dead worker, without what this rank stages
        "fail": (FAILED, ()),
        "abandon": (ABANDONED, ()),
        "lose": (FAILED, ()),
    },
    SEALED: {
        "prepared": (WRITING, (WRITE,)),
        "written": (SEALED, ()),  # it is being ended
        "commit": (COMMITTED, ()),
        "fail": (FAILED, ()),
        "abandon": (FAILED, ()),
        "lose": (UNKNOWN, ()),
    },
    WRITING: {
        "written": (DURABLE, (COMPLETE,)),
        "commit": (COMMITTED, ()),
        "fail": (FAILED, ()),
        "abandon": (FAILED, ()),
        "lose": (UNKNOWN, ()),
    },
    DURABLE: {
        "commit": (COMMITTED, ()),
        "fail": (FAILED, ()),
        "abandon": (FAILED, ()),
        "lose": (UNKNOWN, ()),
    },
    RECOVERING: {
        "seal": (RECOVERING, (COMPARE,)),
        "resume_open": (OPEN, ()),
        "resume_sealed": (SEALED, (PROCEED,)),
        "commit": (COMMITTED, ()),
        "fail": (FAILED, ()),
        "abandon": (FAILED, ()),
        "lose": (UNKNOWN, ()),
    },
}

ENDS = {COMMITTED: "commit", FAILED: "fail", ABANDONED: "abandon", UNKNOWN: "lose"}
"""How a save has ended -> the event that this is for each rank's part."""

EVENTS = frozenset(event for row in TABLE.values() for event in row)
STEPS = frozenset(step for row in TABLE.values() for _, steps in row.values() for step in steps)
