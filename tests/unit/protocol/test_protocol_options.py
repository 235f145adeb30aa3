"""The options of `asyncckpt-worker`: commands that start one pass every option on."""

from __future__ import annotations

import argparse

from asyncckpt.protocol.options import add_options, to_arguments

VALUES = {
    "endpoint": "ipc:///x/w.sock",
    "root": "/a",
    "mirror": "/b",
    "max_write_bandwidth": "800M",
    "max_mirror_bandwidth": "900M",
    "advertise": "host",
    "metrics": "127.0.0.1:9555",
    "log_format": "json",
    "log_file": "/x/log",
}
"""What an option is given that takes no number."""


def test_a_command_that_starts_a_worker_passes_every_option_on() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    words = []
    for action in parser._actions[1:]:
        words.append(action.option_strings[0])
        if action.nargs != 0:
            words.append(VALUES.get(action.dest, "77"))
    given = parser.parse_args(words)
    assert all(value != parser.get_default(name) for name, value in vars(given).items()), "a value for each option"
    assert parser.parse_args(to_arguments(given)) == given


def test_an_empty_root_is_passed_on_for_the_worker_to_refuse() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    assert to_arguments(parser.parse_args(["--root", "", "--mirror=", "--endpoint="])) == ["--root=", "--mirror="]
