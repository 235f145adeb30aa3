"""basics.storage_options, and where options of object stores are taken: nothing shows their values."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from asyncckpt.basics.storage_options import MAX_OPTIONS, StorageOptions
from asyncckpt.config import CheckpointerConfig
from asyncckpt.errors import ConfigError, ProtocolError
from asyncckpt.protocol.messages import Hello
from asyncckpt.storage import locate
from asyncckpt.storage.cloud.object_store import ObjectStore
from asyncckpt.storage.locate import store_at, with_storage_options
from tests import object_servers

object_servers.start_runtime()

SECRETS = {"region": "eu", "secret_access_key": "SECRET", "access_key_id": "SECRET"}


@pytest.mark.parametrize(
    "wrong",
    [
        "SECRET",
        ["SECRET"],
        {"a": 1},
        {1: "SECRET"},
        {"": "SECRET"},
        {"a": "SECRET\0"},
        dict.fromkeys(map(str, range(65)), "SECRET"),
    ],
)
def test_what_is_no_map_of_texts_is_refused_and_not_shown(wrong: Any) -> None:
    for make in (StorageOptions, lambda given: CheckpointerConfig(storage_options=given)):
        with pytest.raises(ConfigError, match=f"at most {MAX_OPTIONS} names") as caught:
            make(wrong)
        assert caught.value.field == "storage_options" and "SECRET" not in repr(caught.value.__dict__) + str(
            caught.value
        )


def test_options_are_a_map_that_shows_its_names_only() -> None:
    options = StorageOptions(SECRETS)
    assert dict(options) == SECRETS and options == SECRETS and hash(options) == hash(StorageOptions(SECRETS))
    assert (
        repr(options) == "{'access_key_id': ..., 'region': ..., 'secret_access_key': ...}"
        and repr(StorageOptions()) == "{}"
    )


def test_a_config_shows_no_values_and_takes_them_from_the_environment() -> None:
    config = CheckpointerConfig(storage_options=SECRETS)
    assert config.storage_options == SECRETS and "SECRET" not in repr(config)
    assert dataclasses.replace(config, slots=1).storage_options == SECRETS
    environ = {"ASYNCCKPT_STORAGE_OPTIONS": '{"region": "SECRET"}'}
    assert CheckpointerConfig.resolve(None, {}, environ).storage_options == {"region": "SECRET"}
    for wrong in ("SECRET", '["SECRET"]'):
        with pytest.raises(ConfigError) as caught:
            CheckpointerConfig.resolve(None, {}, {"ASYNCCKPT_STORAGE_OPTIONS": wrong})
        assert "SECRET" not in str(caught.value)


def test_a_hello_shows_none_even_if_they_are_wrong() -> None:
    fields: dict[str, Any] = {"id": 1, "session": "0" * 16, "replaces": "", "package": "x", "pid": 1, "pid_start": 1}
    hello = Hello(**fields, rank=0, world_size=1, storage=SECRETS)
    assert "SECRET" not in repr(hello)
    with pytest.raises(ProtocolError) as caught:
        Hello(**fields, rank=0, world_size=1, storage={"a": ["SECRET"]})  # type: ignore[dict-item]
    assert "SECRET" not in str(caught.value)


def test_a_store_is_opened_with_the_options_of_the_call_and_kept_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore", reason="the extra cloud is not installed")
    monkeypatch.setattr(locate, "_stores", {})
    plain = store_at("s3://bucket/a")
    with with_storage_options(SECRETS):
        given = store_at("s3://bucket/a")
        with with_storage_options({"region": "us"}):
            inner = store_at("s3://bucket/a")
        with with_storage_options(None):
            assert store_at("s3://bucket/b") is given
    assert len({id(one) for one in (plain, given, inner)}) == 3 and store_at("s3://bucket/a") is plain
    assert isinstance(given, ObjectStore) and "SECRET" not in repr(given)


def test_only_so_many_stores_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore", reason="the extra cloud is not installed")
    monkeypatch.setattr(locate, "_stores", {})
    monkeypatch.setattr(locate, "MAX_STORES", 2)
    for bucket in ("aaa", "bbb", "ccc"):
        store_at(f"s3://{bucket}/x")
    assert [root for root, *_ in locate._stores] == ["s3://bbb", "s3://ccc"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"nonsense": "SECRET"},
        {"conditional_put": "SECRET"},
        {"timeout": "SECRET"},
        {"virtual_hosted_style_request": "SECRET"},
    ],
)
def test_an_option_that_the_store_does_not_take_is_an_error_of_configuration(wrong: dict[str, str]) -> None:
    pytest.importorskip("obstore", reason="the extra cloud is not installed")
    with pytest.raises(ConfigError) as caught, with_storage_options(wrong):
        store_at("s3://bucket/a")
    assert caught.value.field == "storage_options"
    assert next(iter(wrong)) in str(caught.value) and "SECRET" not in str(caught.value)
