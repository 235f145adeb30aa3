"""No setting and no argument is accepted and ignored: each is listed here with the tests that show what it changes.

A new field or argument fails these tests until it has its line. What API.md promises and is not there yet is refused
by name.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pathlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import asyncckpt  # noqa: E402
from asyncckpt import (  # noqa: E402
    AsyncCheckpointer,
    CheckpointerConfig,
    CheckpointProcess,
    CheckpointStager,
    SyncCheckpointer,
)
from asyncckpt.errors import ConfigError  # noqa: E402
from asyncckpt.loading.opened import OpenCheckpoint  # noqa: E402

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]

FIELDS = {
    "staging": "integration/test_overlap.py::test_blocking_stays_blocking_with_an_optimizer_attached, "
    "unit/test_staging_snapshots.py::test_everything_may_change_as_soon_as_save_has_returned, "
    "integration/test_overlap.py::test_auto_copies_behind_the_training_once_an_optimizer_is_attached, "
    "integration/test_overlap.py::test_overlap_by_name_copies_everything_later_and_the_fence_says_when",
    "overlap_check": "integration/test_overlap_ends.py::test_digests_find_writes_that_no_counter_sees, "
    "unit/test_staging_torn.py::test_a_write_to_one_window_of_many_is_found_never_sometimes_and_always",
    "slots": "integration/test_async_saving.py::test_policy_when_the_only_slot_is_in_use, "
    "unit/test_slot_pool.py::test_a_second_slot_is_made_only_while_the_first_is_in_use",
    "on_busy": "integration/test_async_saving.py::test_policy_when_the_only_slot_is_in_use, "
    "unit/test_slot_pool.py::test_policy_when_every_slot_is_in_use",
    "slot_timeout_s": "integration/test_async_saving.py::test_policy_when_the_only_slot_is_in_use, "
    "unit/test_slot_pool.py::test_waiting_for_a_slot_ends_at_its_deadline",
    "arena_limit_bytes": "integration/test_bounded_memory.py::"
    "test_a_state_larger_than_the_limit_is_saved_within_it, "
    "integration/test_save_errors.py::"
    "test_a_limit_that_is_too_small_even_for_segments_fails_the_save_and_a_smaller_state_is_saved, "
    "unit/test_slot_pool.py::test_the_limit_covers_all_slots_together, "
    "integration/test_prepare.py::test_from_the_third_save_of_each_structure_on_nothing_is_allocated",
    "on_worker_loss": "integration/test_worker_loss.py::"
    "test_a_save_in_flight_fails_within_a_second_and_the_next_one_works, "
    "integration/test_worker_resubmission.py::test_a_save_in_flight_is_written_by_the_next_worker",
    "keep_in_memory": "unit/test_keeping.py::test_the_newest_committed_snapshot_is_never_overwritten, "
    "integration/test_keep_in_memory.py::test_a_torn_staging_leaves_the_snapshot_before_in_memory",
    "events": "integration/test_worker_looked_at.py::test_the_events_tell_of_each_save_from_both_sides, "
    "integration/test_worker_looked_at.py::"
    "test_without_events_no_file_is_made_and_a_report_knows_what_the_manifests_say",
    "on_error": "integration/test_async_settings.py::test_on_error_raise_raises_what_nobody_fetched, "
    "integration/test_async_settings.py::test_on_error_warn_raises_nothing",
    "overwrite": "integration/test_ranks_overwrite.py::"
    "test_saves_that_follow_too_closely_fail_by_name_and_never_run_at_once",
    "fsync": "integration/test_async_settings.py::test_without_fsync_the_manifest_says_so",
    "layout": "integration/test_ranks_layout_dcp.py::test_a_worker_writes_it_and_every_command_knows_it, "
    "unit/test_layout_dcp.py::test_stock_tools_read_every_leaf",
    "files_per_rank": "integration/test_async_settings.py::test_files_per_rank_spreads_the_tensors",
    "max_shard_bytes": "integration/test_async_settings.py::"
    "test_no_shard_file_is_larger_than_the_limit_and_the_index_knows_which_holds_what",
    "allow_pickle": "integration/test_async_leaves.py::test_pickles_go_through_a_worker_that_does_not_open_them",
    "use_pinned_memory": "unit/test_staging_devices.py::"
    "test_without_pinned_memory_nothing_is_registered_and_the_fence_waits, "
    "unit/test_staging_devices.py::test_a_slot_is_pinned_once_and_unpinned_before_it_is_unmapped",
    "use_non_blocking_copy": "unit/test_staging_devices.py::test_non_blocking_copies_are_those_that_were_asked_for",
    "write_threads": "integration/test_async_settings.py::test_write_threads_are_asked_for, "
    "unit/test_thread_arguments.py::test_write_threads_write_at_once",
    "replicated": "integration/test_ranks_arguments.py::"
    "test_replicated_says_whether_replicas_are_compared_or_taken_on_trust",
    "plan_timeout_s": "integration/test_ranks_async.py::test_saving_on_rank_zero_only_gets_a_clear_error_not_a_hang",
    "hook_timeout_s": "integration/test_ranks_async.py::test_a_hook_is_waited_for_hook_timeout_s",
    "commit_timeout_s": "integration/test_async_settings.py::"
    "test_a_save_that_takes_longer_than_commit_timeout_s_fails_and_the_worker_goes_on, "
    "integration/test_ranks_async.py::test_a_rank_that_does_not_stage_in_time_is_named_on_every_rank",
    "worker_timeout_s": "integration/test_async_settings.py::test_a_worker_that_is_silent_for_worker_timeout_s_is_lost",
    "worker_start_timeout_s": "integration/test_save_errors.py::"
    "test_an_endpoint_that_nobody_serves_fails_the_constructor",
    "worker_shutdown_timeout_s": "integration/test_async_ends.py::test_close_leaves_to_the_worker_what_takes_too_long",
    "rank_info": "integration/test_async_settings.py::test_rank_info_lets_rank_zero_of_a_world_save_alone",
}
SHARDING = "unit/test_sharding_types.py::"
SYNC_FIELDS = {
    "arena_limit_bytes": "integration/test_sync_checkpointer.py::test_a_state_larger_than_limit_or_memory_is_refused",
    "overwrite": "integration/test_ranks_overwrite.py::"
    "test_sync_saves_replace_one_another_at_one_path_and_nothing_else",
    "fsync": "integration/test_sync_checkpointer.py::test_settings_change_what_is_written",
    "layout": "unit/test_layout_dcp.py::test_stock_tools_read_every_leaf",
    "files_per_rank": "integration/test_sync_checkpointer.py::test_settings_change_what_is_written",
    "max_shard_bytes": "integration/test_sync_checkpointer.py::test_max_shard_bytes_limits_every_file",
    "allow_pickle": "unit/test_allow_pickle.py::test_any_leaf_comes_back_when_both_sides_allow_it",
    "use_pinned_memory": "integration/test_overlap_devices.py::test_a_synchronous_save_goes_the_same_way",
    "use_non_blocking_copy": "integration/test_overlap_devices.py::test_a_synchronous_save_goes_the_same_way",
    "write_threads": "unit/test_thread_arguments.py::test_write_threads_write_at_once",
    "replicated": "integration/test_ranks_arguments.py::"
    "test_replicated_says_whether_replicas_are_compared_or_taken_on_trust",
    "plan_timeout_s": "integration/test_ranks_sync.py::test_a_rank_that_does_not_save_is_named",
    "commit_timeout_s": "integration/test_ranks_arguments.py::"
    "test_a_synchronous_save_waits_commit_timeout_s_for_the_other_ranks",
    "rank_info": "integration/test_ranks_sync.py::test_several_ranks_need_a_process_group",
}
SAVE = {
    "state_dict": "integration/test_async_saving.py::test_everything_that_is_saved_is_loaded_bit_for_bit",
    "path": "integration/test_async_saving.py::test_relative_paths_are_the_trainer_s",
    "step": "integration/test_async_saving.py::test_step_is_the_state_s_own_else_the_number_of_the_save",
    "metadata": "integration/test_async_saving.py::test_step_metadata_and_save_id_are_in_the_manifest",
    "kw": "integration/test_async_settings.py::test_own_parts_get_the_extra_arguments_of_save_and_load, "
    "integration/test_staging_hazards.py::test_arguments_that_no_part_takes_are_refused",
}
SYNC_SAVE = {
    "state_dict": "integration/test_sync_checkpointer.py::test_everything_that_is_saved_is_loaded_bit_for_bit",
    "path": "integration/test_sync_checkpointer.py::test_everything_that_is_saved_is_loaded_bit_for_bit",
    "step": "integration/test_sync_checkpointer.py::test_step_metadata_and_lineage_are_as_of_the_asynchronous_one",
    "metadata": "integration/test_sync_checkpointer.py::test_step_metadata_and_lineage_are_as_of_the_asynchronous_one",
    "kw": "integration/test_sync_checkpointer.py::test_an_own_writer_gets_the_extra_arguments_and_its_exceptions_raise",
}
LOAD = {
    "path": "unit/test_loading_load.py::test_nothing_there_and_never_committed_are_told_apart",
    "state_dict": "unit/test_loading_load.py::test_tensors_are_filled_in_place_and_objects_replaced",
    "keys": "unit/test_loading_load.py::test_keys_select_names_and_prefixes",
    "default_map_location": "unit/test_loading_load.py::test_map_location_as_device_string_or_dict, "
    "unit/test_loading_load.py::test_map_location_as_callable_gets_each_storage_once",
    "strict": "unit/test_loading_load.py::test_strict_lists_all_missing_keys_and_changes_nothing",
    "verify": "unit/test_loading_load.py::test_without_verification_damage_is_not_noticed",
    "source": "integration/test_recall.py::test_what_is_committed_and_in_memory_is_read_from_there",
    "threads": "unit/test_thread_arguments.py::test_threads_read_at_once",
    "key_map": "unit/test_loading_load.py::test_key_map_renames",
    "allow_pickle": "unit/test_allow_pickle.py::test_any_leaf_comes_back_when_both_sides_allow_it",
    "low_memory": "unit/test_loading_targets.py::test_without_low_memory_nothing_changes_until_everything_is_verified",
    "redundant_reads": "integration/test_ranks_shared_load.py::test_what_several_ranks_want_is_read_once",
}
METHOD_LOAD = {
    **{name: LOAD[name] for name in ("path", "state_dict", "strict")},
    "default_map_location": "integration/test_async_settings.py::"
    "test_own_parts_get_the_extra_arguments_of_save_and_load",
    "kw": "integration/test_async_settings.py::test_own_parts_get_the_extra_arguments_of_save_and_load",
}
FACTORY = {
    "config": "unit/test_every_argument.py::test_factories_take_a_config",
    "rank_info": "integration/test_ranks_async.py::"
    "test_rank_info_for_rank_zero_saves_alone_whatever_the_environment_says",
    "commit_hook": "integration/test_ranks_async.py::"
    "test_hooks_of_all_ranks_are_asked_and_one_veto_ends_the_save_on_all",
}
RESTORE = {
    "strict": "unit/test_restoring.py::test_missing_keys_are_raised_unless_told_otherwise",
    "root": "unit/test_restoring.py::test_the_newest_is_taken_and_nothing_is_said",
    "state_dict": "unit/test_restoring.py::test_a_damaged_one_is_passed_over_and_that_is_said",
    "quarantine": "unit/test_restoring.py::test_on_request_broken_ones_are_put_aside_and_offered_no_more",
    "rank_info": "unit/test_restoring.py::test_several_ranks_without_a_place_to_meet_are_refused_and_one_may_go_alone",
    "options": "unit/test_restoring.py::test_without_low_memory_a_broken_one_leaves_no_trace, "
    "unit/test_restoring.py::test_arguments_that_make_no_sense_are_raised",
}
SURFACE: list[tuple[Callable[..., Any], dict[str, str]]] = [
    (AsyncCheckpointer.save, SAVE),
    (SyncCheckpointer.save, SYNC_SAVE),
    (AsyncCheckpointer.load, {name: METHOD_LOAD[name] for name in ("path", "state_dict", "kw")}),
    (SyncCheckpointer.load, METHOD_LOAD),
    (
        AsyncCheckpointer.__init__,
        {
            "endpoint": "integration/test_save_errors.py::test_an_endpoint_that_nobody_serves_fails_the_constructor",
            "config": "integration/test_async_settings.py::test_a_config_object_and_single_fields_are_combined",
            "checkpoint_stager": "integration/test_async_settings.py::"
            "test_own_parts_get_the_extra_arguments_of_save_and_load",
            "checkpoint_process": "integration/test_async_settings.py::"
            "test_own_parts_get_the_extra_arguments_of_save_and_load",
            "reader": "integration/test_async_settings.py::test_own_parts_get_the_extra_arguments_of_save_and_load",
            "commit_hook": FACTORY["commit_hook"],
            "fields": "integration/test_async_settings.py::test_a_config_object_and_single_fields_are_combined",
        },
    ),
    (
        SyncCheckpointer.__init__,
        {
            "writer": "integration/test_sync_checkpointer.py::"
            "test_an_own_writer_gets_the_extra_arguments_and_its_exceptions_raise",
            "reader": "integration/test_sync_checkpointer.py::test_an_own_reader_gets_the_extra_arguments",
            "config": FACTORY["config"],
            "commit_hook": "integration/test_ranks_sync.py::"
            "test_a_veto_of_one_rank_publishes_nothing_and_hooks_get_the_extra_arguments",
            "fields": "integration/test_sync_checkpointer.py::test_settings_change_what_is_written",
        },
    ),
    (
        AsyncCheckpointer.attach,
        {
            "optimizers": "integration/test_overlap.py::"
            "test_auto_copies_behind_the_training_once_an_optimizer_is_attached"
        },
    ),
    (AsyncCheckpointer.detach, {}),
    (AsyncCheckpointer.fence, {}),
    (AsyncCheckpointer.pending, {}),
    (
        AsyncCheckpointer.prepare,
        {"state_dict": "integration/test_prepare.py::test_the_first_save_after_prepare_makes_nothing"},
    ),
    (AsyncCheckpointer.wait, {"timeout": "integration/test_async_ends.py::test_wait_and_pending"}),
    (
        AsyncCheckpointer.close,
        {"timeout_s": "integration/test_async_ends.py::test_close_leaves_to_the_worker_what_takes_too_long"},
    ),
    (
        AsyncCheckpointer.latest_checkpoint,
        {
            "root": "integration/test_ranks_async.py::"
            "test_all_ranks_go_on_from_the_save_that_was_in_flight_when_their_predecessors_died",
            "timeout_s": "integration/test_ranks_arguments.py::"
            "test_latest_checkpoint_waits_timeout_s_for_saves_in_flight",
            "source": "integration/test_recall.py::test_snapshot_that_could_not_be_written_is_loaded_and_is_the_newest",
        },
    ),
    (asyncckpt.restore_latest, RESTORE),
    (
        SyncCheckpointer.restore_latest,
        {
            **{name: RESTORE[name] for name in ("root", "state_dict", "strict", "quarantine", "options")},
            "timeout_s": "integration/test_ranks_restoring.py::"
            "test_a_rank_that_does_not_come_is_named_in_time_and_the_next_call_works",
        },
    ),
    (asyncckpt.make_async_checkpointer, FACTORY),
    (
        asyncckpt.make_sync_checkpointer,
        {
            "config": FACTORY["config"],
            "rank_info": "unit/test_every_argument.py::test_factories_take_a_rank",
            "commit_hook": "integration/test_ranks_sync.py::"
            "test_a_veto_of_one_rank_publishes_nothing_and_hooks_get_the_extra_arguments",
        },
    ),
    (asyncckpt.load, LOAD),
    (
        asyncckpt.plan_load,
        {
            "path": "unit/test_plan_load.py::test_what_cannot_be_planned_is_refused",
            "state_dict": "unit/test_plan_load.py::test_everything_that_does_not_fit_is_listed_at_once",
            "keys": "unit/test_plan_load.py::test_keys_limit_what_is_looked_at",
            "key_map": "unit/test_plan_load.py::test_key_map_renames",
            "rank_info": "unit/test_plan_load.py::test_values_of_other_ranks_are_told_apart",
            "source": "integration/test_recall.py::test_snapshot_is_opened_and_planned_for_while_the_disk_is_slow",
        },
    ),
    (
        asyncckpt.open_checkpoint,
        {
            "path": "unit/test_open_checkpoint.py::test_it_says_what_is_there_without_reading_data",
            "rank_info": "unit/test_open_checkpoint.py::test_a_rank_sees_its_own_values",
            "allow_pickle": "unit/test_allow_pickle.py::test_opening_may_unpickle_when_told_to",
            "source": "integration/test_recall.py::test_snapshot_is_opened_and_planned_for_while_the_disk_is_slow",
        },
    ),
    (
        OpenCheckpoint.tensor,
        {
            "fqn": "unit/test_open_checkpoint.py::test_what_is_not_there_is_named",
            "slices": "unit/test_open_checkpoint.py::test_slices_select_what_indexing_would",
            "verify": "unit/test_open_checkpoint.py::test_damage_outside_the_part_does_not_matter_and_inside_is_named",
            "threads": "unit/test_thread_arguments.py::test_threads_read_at_once",
            "mmap": "unit/test_foreign_reading.py::test_a_tensor_is_mapped_and_writes_stay_private",
        },
    ),
    (
        OpenCheckpoint.objects_of,
        {"rank": "unit/test_open_checkpoint.py::test_a_reader_of_another_world_finds_every_ranks_values_by_name"},
    ),
    (
        asyncckpt.ShardedSlice,
        {
            "tensor": "unit/test_shard_planning.py::test_slices_are_stored_once_each_and_equal_ones_are_split",
            "global_shape": f"{SHARDING}test_a_shard_outside_of_its_tensor_is_refused_by_name_with_both_boxes",
            "offsets": "unit/test_shard_planning.py::test_slices_that_overlap_on_two_ranks_are_refused_with_both_boxes",
            "replica_id": "unit/test_shard_planning.py::test_slices_that_are_new_are_written_by_the_first_replica",
        },
    ),
    (
        asyncckpt.FlatShard,
        {
            "tensor": f"{SHARDING}test_flat_ranges_are_few_boxes_that_are_views",
            "global_shape": f"{SHARDING}test_flat_ranges_are_few_boxes_that_are_views",
            "start": f"{SHARDING}test_flat_ranges_are_few_boxes_that_are_views",
        },
    ),
    (
        asyncckpt.describe_tp,
        {
            "state_dict": f"{SHARDING}test_tensor_parallel_slices_are_found_by_their_shapes",
            "global_shapes": f"{SHARDING}test_tensor_parallel_slices_are_found_by_their_shapes",
            "tp_rank": f"{SHARDING}test_tensor_parallel_slices_are_found_by_their_shapes",
            "tp_size": f"{SHARDING}test_tensor_parallel_slices_that_no_single_dimension_explains_are_refused",
        },
    ),
    (
        asyncckpt.register_shard_type,
        {
            "kind": f"{SHARDING}test_a_type_that_is_none_cannot_be_registered",
            "to_shards": f"{SHARDING}test_padded_shards_of_a_registered_type_are_stored_without_their_padding",
            "from_shards": f"{SHARDING}test_a_registered_type_is_told_once_when_all_its_parts_are_in",
        },
    ),
    (
        asyncckpt.held_snapshots,
        {
            "root": "integration/test_recall.py::test_snapshot_that_could_not_be_written_is_loaded_and_is_the_newest",
            "endpoint": "integration/test_recall.py::test_worker_is_asked_at_the_endpoint_that_is_named",
        },
    ),
    (
        asyncckpt.latest_checkpoint,
        {"root": "unit/test_loading_load.py::test_the_newest_checkpoint_is_told_and_what_is_passed_over_is_said"},
    ),
]
M = "integration/test_manager.py::"
KEPT = f"{M}test_the_newest_the_best_the_pinned_and_those_of_the_period_stay"
POLICIES = f"{M}test_should_save_says_what_the_policies_say"
STOP = f"{M}test_after_the_signal_the_last_save_is_staged_and_the_worker_finishes_it"
SURFACE += [
    (
        asyncckpt.CheckpointManager.__init__,
        {
            "root": f"{M}test_a_step_is_restored_or_nothing",
            "checkpointer": f"{M}test_a_synchronous_checkpointer_is_managed_alike",
            "max_to_keep": KEPT,
            "keep_period": KEPT,
            "save_interval_steps": POLICIES,
            "save_interval_s": f"{POLICIES}, integration/test_ranks_manager.py::"
            "test_rank_0_s_clock_says_when_to_save_on_all_ranks",
            "save_on_steps": POLICIES,
            "save_when": POLICIES,
            "best_fn": KEPT,
            "best_mode": KEPT,
            "step_format": f"{M}test_a_synchronous_checkpointer_is_managed_alike",
            "preemption_signal": STOP,
            "grace_s": f"{M}test_what_is_not_staged_within_the_grace_is_said",
            "mtbf_s": f"{M}test_the_interval_is_suggested_in_the_log",
            "shared": "integration/test_manager_root.py::test_those_that_mean_to_share_a_root_do",
            "quarantine": f"{M}test_a_broken_one_is_passed_over_and_that_is_said",
            "fields": f"{M}test_settings_that_make_no_sense_are_refused",
        },
    ),
    (asyncckpt.CheckpointManager.should_save, {"step": POLICIES}),
    (asyncckpt.CheckpointManager.reached_preemption, {"step": STOP}),
    (asyncckpt.CheckpointManager.preempt, {}),
    (
        asyncckpt.CheckpointManager.save,
        {
            "step": STOP,
            "state": f"{M}test_a_training_goes_on_bit_for_bit_with_all_that_it_has",
            "metrics": KEPT,
            "metadata": KEPT,
            "kw": f"{M}test_arguments_that_no_part_takes_are_refused",
        },
    ),
    (
        asyncckpt.CheckpointManager.restore,
        {
            "strict": RESTORE["strict"],
            "state": f"{M}test_a_training_goes_on_bit_for_bit_with_all_that_it_has",
            "step": f"{M}test_a_step_is_restored_or_nothing",
            "options": f"{M}test_a_broken_one_is_passed_over_and_that_is_said",
        },
    ),
    (asyncckpt.CheckpointManager.pin, {"step": KEPT}),
    (asyncckpt.CheckpointManager.unpin, {"step": KEPT}),
    (asyncckpt.CheckpointManager.wait, {"timeout": f"{M}test_waiting_ends_at_its_timeout"}),
    (asyncckpt.CheckpointManager.close, {}),
    (
        asyncckpt.optimal_interval,
        {
            "save_cost_s": "unit/test_managing.py::test_the_interval_loses_least_in_all",
            "mtbf_s": "unit/test_managing.py::test_the_interval_loses_least_in_all",
        },
    ),
    (
        asyncckpt.refresh_master_params,
        {
            "optimizer": "unit/test_managing.py::test_each_known_form_of_masters_is_understood",
            "but": "unit/test_managing.py::test_masters_that_are_spared_stay",
        },
    ),
]
GENERAL = (
    *("kw", "fields", "options", "tensor", "kind", "global_shapes", "path", "root", "optimizers", "rank"),
    "state_dict",
)
"""Arguments that are given by position: a test need not name them."""


def arguments_of(function: Callable[..., Any]) -> set[str]:
    """Return the names of what may be given; `NoReturn` marks what is there only to be refused."""
    found = inspect.signature(function).parameters
    return {name for name, one in found.items() if name != "self" and one.annotation != "NoReturn"}


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """docs/check_parity.py, loaded: it knows which tests there are."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "docs"))
    return importlib.import_module("check_parity")


def assert_shown(check: ModuleType, name: str, tests: str, *, is_named: bool = True) -> None:
    """Every test exists, and its file speaks of the argument."""
    for test in tests.split(", "):
        assert not check.wrong_claims(f"tests/{test}", REPOSITORY), test
        text = (REPOSITORY / "tests" / test.partition("::")[0]).read_text()
        assert not is_named or name in text, f"{test} does not speak of {name}"


def test_every_field_of_the_config_has_tests_of_its_effect(check: ModuleType) -> None:
    assert set(FIELDS) == {field.name for field in dataclasses.fields(CheckpointerConfig)}
    for name, tests in FIELDS.items():
        assert_shown(check, name, tests)


@pytest.mark.parametrize(("function", "shown"), SURFACE, ids=[f.__qualname__ for f, _ in SURFACE])
def test_every_argument_has_tests_of_its_effect(
    check: ModuleType, function: Callable[..., Any], shown: dict[str, str]
) -> None:
    assert set(shown) == arguments_of(function)
    for name, tests in shown.items():
        assert_shown(check, name, tests, is_named=name not in GENERAL)


def test_the_synchronous_checkpointer_refuses_the_fields_that_it_has_no_use_for(check: ModuleType) -> None:
    for field in dataclasses.fields(CheckpointerConfig):
        given = {field.name: field.default}
        if field.name in SYNC_FIELDS:
            assert_shown(check, field.name, SYNC_FIELDS[field.name])
            SyncCheckpointer(**given).close()
        else:
            with pytest.raises(ConfigError, match=f"{field.name} is about the worker"):
                SyncCheckpointer(**given)


# ---- replaced parts


class Process(CheckpointProcess):
    """Writes nothing."""

    def write(self, staging_result: Any, path: str, **kw: Any) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        pass


class Stager(CheckpointStager):
    """Copies nothing."""

    def stage(self, state_dict: Any, **kw: Any) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        pass


KEPT = ("allow_pickle", "on_error", "worker_shutdown_timeout_s", "rank_info")


@pytest.mark.parametrize("field", dataclasses.fields(CheckpointerConfig), ids=lambda field: field.name)
def test_fields_of_a_replaced_process_are_refused_by_name(field: dataclasses.Field[Any]) -> None:
    given = {field.name: field.default}
    if field.name in KEPT:
        AsyncCheckpointer(checkpoint_process=Process(), **given).close()
    else:
        with pytest.raises(ConfigError, match=f"{field.name} is about the worker") as caught:
            AsyncCheckpointer(checkpoint_process=Process(), **given)
        assert caught.value.field == field.name


@pytest.mark.parametrize("name", ["staging", "overlap_check", "max_shard_bytes", "fsync", "write_threads"])
def test_fields_of_a_replaced_stager_are_refused_by_name(name: str) -> None:
    given = {name: getattr(CheckpointerConfig(), name)}
    with pytest.raises(ConfigError, match=f"{name} is about the default stager"):
        AsyncCheckpointer(checkpoint_stager=Stager(), **given)


# ---- factories


def test_factories_take_a_config(tmp_path: pathlib.Path) -> None:
    config = CheckpointerConfig(files_per_rank=2, slots=3)
    with asyncckpt.make_sync_checkpointer(config=config) as checkpointer:
        checkpointer.save({"a": torch.ones(1000), "b": torch.ones(1000)}, tmp_path / "a")
    assert len(list((tmp_path / "a").glob("*.safetensors"))) == 2


def test_factories_take_a_rank(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with asyncckpt.make_sync_checkpointer(rank_info=asyncckpt.RankInfo(0, 1)) as checkpointer:
        checkpointer.save({"a": 1}, tmp_path / "a")
    assert asyncckpt.load(tmp_path / "a") == {"a": 1}
