"""Mutants that a test notices, some of each package: CI plants them one by one and sees that the test still does.

python -m tests.mutants.noticed
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import partial

from tests.mutants.packages import ROOT
from tests.mutants.server import Answer, Functions, find_functions, in_child, plant, run_tests


@dataclass(frozen=True)
class Noticed:
    """A mutant, and the test that it fails.

    file    from the repository's root
    before  what the source has exactly once, and what
    after   it has in its place
    test    by its name for pytest
    """

    file: str
    before: str
    after: str
    test: str

    @property
    def name(self) -> str:
        return f"{self.file}: {self.after}"

    def source(self) -> str:
        """The module with the mutant in it.

        Raises:
            LookupError: What was there is gone: another must be chosen from what the command prints.
        """
        original = (ROOT / self.file).read_text()
        if original.count(self.before) != 1:
            raise LookupError(f"{self.file} has {self.before!r} not exactly once")
        return original.replace(self.before, self.after)


_BUGS = "tests/tsched/test_bug_classes.py"
_CACHES = "tests/tsched/test_prefix_caches.py"
_PAGES = "tests/tmodel/test_kv_cache.py"
_COMPARED = "tests/experiments/runs/test_comparison.py"
_VERDICT = "tests/experiments/reporting/test_question_and_verdict.py"

NOTICED = (
    Noticed("tsched/scheduling/policies/priority.py", "AGEING + sequence", "AGEING - sequence",
            "tests/tsched/test_scheduler_policies.py::test_lower_priorities_go_first_and_age"),
    Noticed("tsched/scheduling/policies/hash_prefix_cache.py", "last = hasher.digest()", "last = None",
            f"{_CACHES}::test_bug_class_15_only_equal_tokens_hit[hash]"),
    Noticed("tsched/scheduling/policies/run_cache.py", "(sequence.tokens.size - 1) //", "(sequence.tokens.size - 2) //",
            f"{_CACHES}::test_bug_class_11_a_full_hit_leaves_the_last_token_to_run[radix]"),
    Noticed("tsched/scheduling/sequence.py", "known - 1 if known >", "known + 1 if known >",
            f"{_BUGS}::test_nothing_of_the_class_is_there[check_an_abort_keeps_what_was_computed-hash-0]"),
    Noticed("tsched/scheduling/step_plan.py", "_move(pages.swap_in, self.swap_ins)", "_move(pages.swap_in, None)",
            "tests/tsched/test_page_moves.py::test_what_leaves_is_read_before_its_page_is_written[a_paged_device]"),
    Noticed("tsched/scheduling/departures.py", "lengths >= self._table", "lengths > self._table",
            f"{_BUGS}::test_13_several_tokens_of_one_step_have_blocks_for_all_of_them[0-2]"),
    Noticed("tsched/scheduling/window.py", "places - self.size + 1", "places - self.size - 1",
            f"{_BUGS}::test_nothing_of_the_class_is_there[check_tenants_share_nothing-windowed hash-0]"),
    Noticed("tmodel/rotary.py", "2 * math.pi / frequencies", "2 * math.pi * frequencies",
            "tests/tmodel/test_rotary.py::test_frequencies_are_those_of_transformers_to_the_bit[llama3]"),
    Noticed("tmodel/rotary.py", "super().inverse_frequencies(dim, length) / self.factor",
            "super().inverse_frequencies(dim, length) * self.factor",
            "tests/tmodel/test_rotary.py::test_frequencies_are_those_of_transformers_to_the_bit[linear]"),
    Noticed("tmodel/kv_cache.py", "prepend=np.int32(-2)) != 1", "prepend=np.int32(-2)) == 1",
            f"{_PAGES}::test_neighbouring_host_pages_are_one_transfer"),
    Noticed("tmodel/kv_cache.py", "if num_host_blocks < 0", "if num_host_blocks < -1",
            f"{_PAGES}::test_the_host_pool_has_a_size"),
    Noticed("tmodel/kv_cache.py", "host[first : first + count].copy_", "host[first : first - count].copy_",
            f"{_PAGES}::test_a_page_may_be_swapped_out_overwritten_and_back_in_one_step"),
    Noticed("tmodel/cache_kinds.py", "if len(sizes) < len(windows)", "if len(sizes) <= len(windows)",
            "tests/tmodel/test_kv_cache.py::test_pages_are_windowed_where_every_layer_has_a_window[0-7]"),
    Noticed("experiments/runs/comparison.py", "freedom = kept - 1 - spent", "freedom = kept - 1 + spent",
            "tests/experiments/runs/test_drift.py::test_what_the_slope_took_of_the_processes_is_counted"),
    Noticed("experiments/runs/comparison.py", "LEVEL / (len(names) - place)", "LEVEL / (len(names) + place)",
            f"{_COMPARED}::test_the_worst_figure_is_judged_first_and_holm_raises_the_level_for_the_next"),
    Noticed("experiments/runs/comparison.py", "else means[1] - means[0]", "else means[1] - means[1]",
            f"{_COMPARED}::test_without_drift_the_difference_is_welchs_and_what_a_run_has_of_its_own"),
    Noticed("experiments/runs/drift.py", "if spread == 0:", "if spread != 0:",
            f"{_COMPARED}::test_a_trend_is_slow_and_what_alternates_is_not"),
    Noticed("experiments/reporting/verdict.py", "if len(times) > 1]", "if len(times) >= 1]",
            f"{_VERDICT}::test_of_kernels_alone_no_variant_is_called_the_fastest_without_a_test"),
    Noticed("experiments/reporting/verdict.py", "verb = \"differs\" if other == 1", "verb = \"differs\" if other == 2",
            f"{_VERDICT}::test_comparisons_that_differ_are_counted"),
    Noticed("experiments/reporting/effects.py", "len(known) == len(spreads)", "len(known) != len(spreads)",
            "tests/experiments/reporting/test_effects.py::test_a_ratio_has_the_spread_of_both_sides_and_of_every_point"),
)  # fmt: skip


def main() -> None:
    importlib.import_module("tests.conftest")
    for noticed in NOTICED:
        for file in (noticed.file, noticed.test.partition("::")[0]):
            importlib.import_module(file.removesuffix(".py").replace("/", "."))
    functions, num_noticed = find_functions(), 0
    without = in_child(partial(run_tests, sorted({one.test for one in NOTICED})), 300)
    if without["outcome"] != "survived":
        print(f"without a mutant: {without}")
    for noticed in NOTICED:
        answer = in_child(partial(_run_planted, noticed, functions), 60)
        if answer == {"outcome": "killed", "by": noticed.test}:
            num_noticed += 1
        else:
            print(f"{noticed.name}: {answer}")
    print(f"{num_noticed} of {len(NOTICED)} mutants are noticed")


def _run_planted(noticed: Noticed, functions: Functions) -> Answer:
    plant(functions, noticed.file, noticed.source())
    return run_tests([noticed.test])


if __name__ == "__main__":
    main()
