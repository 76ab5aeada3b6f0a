"""Each limit has a case in which it alone binds. A new option is a limit with a case, or no limit with a reason."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from blinkpy.config import option_type, options
from blinkpy.dpu.admission.keys_file import TenantTable
from blinkpy.dpu.metrics import LIMITS
from blinkpy.engine.link import handshake_server
from blinkpy.serving import load_choices

TESTS = Path(__file__).parents[2]
FRONT = "plain/front_end"
BUDGETS = f"{FRONT}/test_budgets.py::test_a_refusal_names_its_limit_and_others_are_served"
ADMISSION, HANDSHAKE = f"{FRONT}/test_admission.py", "plain/link/test_handshake_server.py"
UNREAD = f"{FRONT}/test_connections.py::test_only_clients_that_read_nothing_are_disconnected"

# Options of front ends, queues and engines, and the test in which each alone binds.
CASES = {
    "answer_budget_mib": f"{FRONT}/test_budgets.py::test_whole_answers_share_a_budget_and_the_largest_is_evicted",
    "body_budget_mib": f"{FRONT}/test_request_preparation.py::test_unfinished_bodies_share_a_budget",
    "body_timeout_s": BUDGETS,
    "close_timeout_s": UNREAD,
    "cq_entries": "end_to_end/test_standing_loop.py::test_streams_outlive_a_loop_that_is_blocked_for_longer_than_the_lease",
    "engine_hang_s": "end_to_end/test_restart.py::"
    "test_an_engine_hangs_when_its_loop_stands_still_not_when_its_process_is_stopped",
    "engine_timeout_ms": f"{FRONT}/test_frontend_engine.py::test_engine_that_is_lost",
    "grammar_arena_kib": "end_to_end/test_grammar_outputs.py::test_options_that_clash_are_named",
    "grammar_cache_mib": "plain/grammar/test_grammar_compiler.py::test_the_cache_is_bounded_and_keeps_what_is_used",
    "grammar_compile_mib": BUDGETS,
    "grammar_compile_ms": BUDGETS,
    "grammar_digits": "plain/grammar/test_bounded_values.py::test_the_limit_of_digits_is_an_option",
    "grammar_kib": "end_to_end/test_grammar_outputs.py::test_a_grammar_above_the_limit_is_reported",
    "grammar_slots": f"{FRONT}/test_shared_slots.py::test_token_rules_that_lack_a_place_hold_back_no_plain_request",
    "handover_s": f"{FRONT}/test_handover.py::test_requests_that_outlast_a_handover_end_with_an_error",
    "header_timeout_s": BUDGETS,
    "keep_alive_s": f"{FRONT}/test_limits_alone.py::test_an_idle_connection_is_closed",
    "lease_ms": f"{FRONT}/test_limits_alone.py::test_a_worker_without_a_heartbeat_loses_its_queue_pair",
    "max_body_bytes": BUDGETS,
    "max_body_chunks": BUDGETS,
    "max_body_depth": BUDGETS,
    "max_body_values": BUDGETS,
    "max_connections": f"{FRONT}/test_budgets.py::test_excess_connections_are_refused_and_counted",
    "max_flex_requests": f"{ADMISSION}::test_best_effort_requests_leave_slots_and_their_turn_to_others",
    "max_flex_waiting_tokens": f"{ADMISSION}::test_tokens_of_best_effort_that_wait_have_a_limit_of_their_own",
    "max_header_bytes": BUDGETS,
    "max_header_count": BUDGETS,
    "max_lag_ms": f"{FRONT}/test_gate.py::test_overload_refuses_only_new_requests",
    "max_moves": f"{FRONT}/test_fleet.py::test_choices_survive_their_engines",
    "max_output_backlog": f"{FRONT}/test_limits_alone.py::test_a_stream_that_is_not_read_is_cancelled",
    "max_output_backlog_mib": f"{FRONT}/test_limits_alone.py::test_a_stream_that_is_not_read_is_cancelled",
    "max_pipelined": BUDGETS,
    "max_preparing": f"{FRONT}/test_request_preparation.py::"
    "test_the_line_of_middling_requests_is_bounded_and_clients_that_leave_leave_it",
    "max_waiting_s": f"{ADMISSION}::test_requests_that_wait_too_long_get_a_retry_time",
    "max_waiting_tokens": f"{ADMISSION}::test_waiting_tokens_are_exact",
    "move_timeout_s": f"{FRONT}/test_fleet.py::test_without_any_engine_requests_are_refused_and_streams_end",
    "prepare_mib": f"{FRONT}/test_request_preparation.py::test_a_request_that_exceeds_its_resources_is_ended",
    "prepare_ms": BUDGETS,
    "prompt_arena_tokens": "plain/link/test_queue_pair.py::test_busy_when_the_arenas_are_full_and_nothing_is_overwritten",
    "response_store_count": f"{FRONT}/test_response_store.py::test_limits",
    "response_store_mib": f"{FRONT}/test_response_store.py::test_limits",
    "send_timeout_s": UNREAD,
    "shutdown_s": f"{FRONT}/test_frontend_engine.py::test_shutdown_ends_what_takes_too_long",
    "slots": f"{FRONT}/test_frontend_http.py::test_no_slot_is_429_where_none_may_wait_and_others_go_on",
    "sq_entries": "plain/project/test_config.py::test_values_are_checked_wherever_they_come_from",
    "unread_budget_mib": f"{FRONT}/test_budgets.py::test_unread_streams_share_a_budget",
    "worker_hang_s": f"{FRONT}/test_drain.py::test_only_a_worker_with_a_blocked_loop_is_killed",
}
# Limits of a tenant in the file of --api-keys, and of the port for handshakes.
TENANT_CASES = {
    "requests": f"{ADMISSION}::test_requests_of_a_key_in_flight_are_exact",
    "waiting_tokens": f"{ADMISSION}::test_waiting_tokens_are_exact",
    "tokens_per_minute": f"{ADMISSION}::test_tokens_per_minute_count_prompts_and_generated_output",
    "priorities": f"{FRONT}/test_keys.py::test_priorities_that_a_key_may_send",
    "service_tiers": f"{FRONT}/test_keys.py::test_the_service_tier_that_a_key_gets",
}
HANDSHAKE_CASES = {
    "MOST_HANDSHAKES": f"{HANDSHAKE}::test_each_bound_on_handshakes_binds_alone",
    "MOST_OF_ADDRESS": f"{HANDSHAKE}::test_each_bound_on_handshakes_binds_alone",
    "HANDSHAKE_S": f"{HANDSHAKE}::test_a_deadline_covers_the_whole_handshake",
    "MESSAGE_LIMIT": f"{HANDSHAKE}::test_malformed_messages_are_refused_with_a_reason",
}
# Names under which tests know an option.
ALSO = {
    "grammar_cache_mib": "cache_bytes",
    "grammar_digits": "digits",
    "max_moves": "most_moves",
    "prompt_arena_tokens": "prompt_tokens",
    "response_store_count": "most_count",
    "response_store_mib": "most_bytes",
    "grammar_slots": "grammar_share",
}
NO_LIMIT = {
    "data_parallel_size": "a number of processes",
    "tensor_parallel_size": "a number of GPUs",
    "null_step_us": "a pace",
    "port": "an address",
    "rdma_gid_index": "an address",
    "record_steps": "a minimum",
    "ssl_cert_reqs": "a mode",
    "threads": "a number of threads",
    "workers": "a number of processes",
}
# The sections of model, cache and scheduler size the engine's work: tests/compiled/scheduler/test_limits.py and
# tests/plain/models/test_sizing.py.
SECTIONS = ("queue", "engine", "transport", "frontend", "access", "watch")


def numbers() -> set[str]:
    """Options that are numbers, of the sections above."""
    load_choices()
    return {item.name for section, item in options() if section in SECTIONS and option_type(item) in (int, float)}


@cache
def functions_of(path: str) -> dict[str, str]:
    """The tests of a file, and their text."""
    text = (TESTS / path).read_text(encoding="utf-8")
    functions = (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {node.name: text for node in functions}


def test_each_limit_has_a_case() -> None:
    missing = numbers() - set(CASES) - set(NO_LIMIT)
    assert not missing, f"limits without a case: {sorted(missing)}"
    assert not (set(CASES) | set(NO_LIMIT)) - numbers(), "options that are gone"
    assert not set(CASES) & set(NO_LIMIT)
    assert set(LIMITS) <= set(CASES), "limits with a metric"


def test_limits_of_tenants_have_cases() -> None:
    fields = set(TenantTable.__struct_fields__)
    no_limits = {"key", "sha256", "number", "weight", "service_tier", "share_prefixes"}
    assert fields - no_limits == set(TENANT_CASES)


def test_limits_of_handshakes_have_cases() -> None:
    bounds = {name for name in vars(handshake_server) if re.match(r"MOST_|HANDSHAKE_S$|\w+_LIMIT$", name)}
    assert bounds == set(HANDSHAKE_CASES)


@pytest.mark.parametrize("limit", [*CASES, *TENANT_CASES, *HANDSHAKE_CASES])
def test_cases_exist_and_are_about_their_limits(limit: str) -> None:
    path, _, test = ({**CASES, **TENANT_CASES, **HANDSHAKE_CASES})[limit].partition("::")
    assert test in functions_of(path), f"{path} has no {test}"
    shared = "".join(file.read_text(encoding="utf-8") for file in (TESTS / "support").rglob("*.py"))
    assert re.search(rf"\b({limit}|{ALSO.get(limit, limit)})\b", functions_of(path)[test] + shared)
