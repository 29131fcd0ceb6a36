"""Every public fault with money that we know of, and the tests that hold us to its opposite.

`P` numbers are those of the research on products, `F` those of the research on billing. Faults of
those lists that are not about money (pools, secrets, serving) have their tests elsewhere.
"""

HERE = "tests/billing/test_public_faults.py::"
HTTP = "tests/api/test_money_over_http.py::"
HOLDS, MONEY, BUDGETS, WRITER, LEDGER, TOPUPS, RETURNS, RECHARGE, STATEMENTS, RECONCILE = (
    f"tests/billing/test_{name}.py::"
    for name in (
        "holds",
        "money",
        "budgets",
        "writer",
        "ledger",
        "topups",
        "refunds_and_disputes",
        "recharge",
        "statements",
        "reconcile",
    )
)
MACHINE = "tests/billing/test_books_machine.py::"
KILL, CELERY = "tests/billing/test_kill.py::", "tests/billing/test_celery_killed.py::"
SIGNUP, EMAILS = "tests/billing/test_signup.py::", "tests/accounts/test_emails.py::"
KEYS = "tests/accounts/test_keys_and_sessions.py::"
CHAT, CONNECTIONS = "tests/api/test_chat.py::", "tests/api/test_connections.py::"
COMPLETIONS, FUZZ = "tests/api/test_completions.py::", "tests/api/test_fuzz.py::"
VALIDATION, API_STATEMENTS = "tests/api/test_validation.py::", "tests/api/test_statements.py::"
EXPORTS, FORMATTING = "tests/web/test_exports.py::", "tests/web/test_formatting.py::"
CHAOS, RULES = "tests/chaos/test_chaos.py::", "tests/architecture/test_house_rules.py::"
BOOKS_ON_SQLITE = MACHINE + "test_the_books_agree_with_the_oracle_whatever_happens_on_sqlite"
BOOKS_ON_POSTGRESQL = (
    MACHINE + "test_the_books_agree_with_the_oracle_whatever_happens_on_postgresql"
)

FAULTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "P1": (
        "a budget counted twice under load",
        (
            HERE + "test_budget_counted_twice_under_load",
            BUDGETS + "test_many_at_once_never_pass_a_budget",
        ),
    ),
    "P2": ("polling adds the cost again", (HTTP + "test_polling_costs_again",)),
    "P3": (
        "spend of other endpoints misses the budget",
        (HTTP + "test_spend_of_other_endpoints_misses_the_budget",),
    ),
    "P4": ("a budget kept per replica", (HERE + "test_budget_kept_per_replica",)),
    "P5": (
        "a custom price logged as $0",
        (HERE + "test_a_model_with_a_price_of_its_own_logged_as_free",),
    ),
    "P6, F9": (
        "cached tokens at the full price, or at both",
        (
            MONEY + "test_a_cost_is_the_exact_sum_rounded_up_once",
            MONEY + "test_a_cached_token_is_never_dearer",
            CHAT + "test_usage_equals_the_ledger_to_the_nano_dollar",
        ),
    ),
    "P7": (
        "the chunk of the usage taken for empty",
        (
            COMPLETIONS + "test_a_stream_has_usage_and_a_finish_reason",
            CHAT + "test_usage_is_not_streamed_unless_asked_for",
        ),
    ),
    "P8": (
        "what was never measured shown as zero",
        (FORMATTING + "test_durations_and_what_was_never_measured",),
    ),
    "P9": ("negative usage refills a quota", (HERE + "test_negative_usage_refills_the_quota",)),
    "P10, P13, F2": (
        "whoever hangs up pays nothing, or everything",
        (
            HERE + "test_hang_up_at_every_token",
            CONNECTIONS
            + "test_a_stream_that_is_hung_up_stops_within_a_second_and_pays_what_it_got",
            CONNECTIONS + "test_a_cancelled_connection_task_still_closes_its_books",
        ),
    ),
    "P11, F14": (
        "an explicit zero read as missing",
        (
            HERE + "test_explicit_zero_read_as_missing",
            CHAT + "test_a_stream_says_the_same_as_a_whole_answer",
        ),
    ),
    "P12, F2b": (
        "the whole prompt charged for a failure before the first token",
        (
            CONNECTIONS + "test_a_hang_up_before_the_first_token_is_free",
            CHAT + "test_without_a_worker_the_answer_is_503_and_costs_nothing",
        ),
    ),
    "P14": ("an error's text billed as output", (HTTP + "test_error_text_billed_as_output",)),
    "P15": (
        "a hang-up does not stop the engine",
        (CONNECTIONS + "test_a_stream_that_is_hung_up_stops_within_a_second_and_pays_what_it_got",),
    ),
    "P16": (
        "an error after the 200 recorded as a success",
        (CHAT + "test_an_error_inside_a_stream_is_an_event_and_costs_nothing",),
    ),
    "P17": ("no cost on streams", (HTTP + "test_no_cost_on_streams",)),
    "P18, F1": (
        "N at once pass one small balance",
        (
            HOLDS + "test_any_number_of_admissions_at_once_never_oversells",
            HOLDS + "test_two_processes_do_not_oversell_either",
            BOOKS_ON_POSTGRESQL,
        ),
    ),
    "P19, F18": (
        "the prompt left out where no limit is given",
        (HTTP + "test_the_prompt_left_out_where_no_limit_is_given",),
    ),
    "P20": (
        "a limit of cost that counts requests, and only afterwards",
        (
            BUDGETS + "test_what_was_settled_counts_and_what_was_freed_does_not",
            BUDGETS + "test_many_at_once_never_pass_a_budget",
        ),
    ),
    "P21, F7": (
        "an event credited twice, or thrown away before it was credited",
        (
            TOPUPS + "test_a_payment_is_credited_once_however_often_we_hear_of_it",
            TOPUPS + "test_an_event_that_cannot_be_handled_waits_and_keeps_nobody_else_waiting",
            TOPUPS + "test_a_crash_around_a_commit_neither_loses_nor_doubles_credit",
        ),
    ),
    "P22": (
        "free credit farmed with spellings of one inbox, or one network",
        (
            EMAILS + "test_spellings_of_an_inbox",
            SIGNUP + "test_one_inbox_has_one_account_however_it_is_spelt",
            KEYS + "test_an_ipv6_customer_is_a_whole_network",
        ),
    ),
    "P23": (
        "money taken and money logged differ; a limit seen only when a session ends",
        (
            RECONCILE + "test_planted_damage_is_found_by_its_check",
            BUDGETS + "test_an_extension_stays_within_the_budget",
        ),
    ),
    "P25": (
        "a dashboard that sums its first page",
        (
            EXPORTS + "test_exports_of_local_days_are_what_was_charged_on_them",
            EXPORTS + "test_every_number_of_the_pages_is_the_ledgers",
            API_STATEMENTS + "test_pages_of_the_export_are_disjoint_and_complete",
        ),
    ),
    "P26, F12": (
        "days off by one, or off by their zone",
        (
            STATEMENTS + "test_days_of_every_zone_add_up",
            STATEMENTS + "test_the_hour_that_a_clock_repeats_has_two_names",
            EXPORTS + "test_exports_of_local_days_are_what_was_charged_on_them",
        ),
    ),
    "P27": (
        "a dashboard that misses tokens",
        (
            EXPORTS + "test_every_number_of_the_pages_is_the_ledgers",
            RECONCILE + "test_planted_damage_is_found_by_its_check",
        ),
    ),
    "F3": (
        "a key claimed before the write: a failed write and its retry count as nothing",
        (BOOKS_ON_SQLITE, WRITER + "test_a_settlement_that_got_no_answer_is_charged_once"),
    ),
    "F4": (
        "spend in a process's memory lost with it",
        (
            KILL + "test_killed_gateways_leave_books_that_balance",
            CHAOS + "test_streams_go_on_and_money_stays_exact_while_everything_dies_in_turn",
        ),
    ),
    "F5": (
        "an id of the engine's used again drops a row",
        (
            HERE + "test_an_id_of_the_engines_used_again_drops_a_row",
            WRITER + "test_a_request_id_names_one_request",
        ),
    ),
    "F6": (
        "the same use recorded by two messages",
        (HERE + "test_the_same_use_recorded_by_two_messages",),
    ),
    "F8": (
        "refunds and disputes ignored, or a cumulative sum subtracted again",
        (
            RETURNS + "test_two_partial_refunds_in_any_order_each_count_once",
            RETURNS + "test_a_dispute_takes_the_credit_and_the_right_to_spend_until_it_is_won",
            RETURNS + "test_a_refund_or_dispute_that_is_heard_of_before_its_payment_counts",
        ),
    ),
    "F10": (
        "a negative or overflowing cost mints money",
        (
            HERE + "test_overflowing_counts_mint_money",
            HERE + "test_negative_usage_refills_the_quota",
            VALIDATION + "test_a_wrong_value_is_400_with_its_path",
            FUZZ + "test_no_body_is_answered_with_a_failure_of_ours",
        ),
    ),
    "F11": (
        "floats, and rounding in pieces",
        (
            RULES + "test_no_float_touches_money",
            MONEY + "test_a_cost_is_the_exact_sum_rounded_up_once",
        ),
    ),
    "F13": (
        "a revoked key goes on working",
        (
            KEYS + "test_a_revoked_key_is_refused_within_a_second_in_every_process",
            HOLDS + "test_a_revoked_key_admits_nothing_more",
        ),
    ),
    "F15": (
        "a task done twice, or lost with its worker",
        (CELERY + "test_workers_killed_at_random_lose_and_double_nothing",),
    ),
    "F16": (
        "recharges in a loop",
        (
            RECHARGE + "test_many_crossings_at_once_charge_once",
            RECHARGE + "test_three_declines_in_a_row_switch_it_off_and_tell_the_owner",
            RECHARGE + "test_there_is_a_minute_between_two_and_a_limit_a_month",
        ),
    ),
    "F17": (
        "a top-up without idempotency; a failure after the credit",
        (
            TOPUPS + "test_a_double_click_pays_on_one_page",
            TOPUPS + "test_every_order_of_the_events_gives_the_same_books",
        ),
    ),
}
