"""Mutates the Python modules of a package and says which mutants no test notices.

    python -m tests.mutants tsched
    python -m tests.mutants tmodel --count 300 --seed 0
    python -m tests.mutants report --survivors     # only those that survived are run again

What was found is kept under ~/.cache/tkernels/mutants, and a second call goes on from there. The status is 1 where
fewer than LEAST_SHARE are killed, or one of the others has no reason in tests/mutants/reasons.txt.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from tests.mutants.campaign import Kept, Workbench
from tests.mutants.faults import Mutant
from tests.mutants.packages import PACKAGES
from tests.mutants.reasons import find_reason
from tmodel.presets import cache_folder

LEAST_SHARE = 0.85


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", choices=PACKAGES)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--survivors", action="store_true", help="run those again that survived")
    arguments = parser.parse_args()
    package, folder = PACKAGES[arguments.package], cache_folder() / "mutants"
    kept = Kept(package, folder, arguments.count, arguments.seed)
    waiting = [one for one in kept.mutants if (fate := kept.fate(one)) is None
               or (arguments.survivors and fate.outcome != "killed")]  # fmt: skip
    if waiting:
        run(waiting, kept, arguments.package, folder)
    reasons = 0
    for mutant in kept.mutants:
        fate = kept.fate(mutant)
        if fate is not None and fate.outcome != "killed":
            reason = find_reason(mutant.file, mutant.change)
            print(f"\n{fate.outcome}{reason and ': ' + reason}\n{mutant.name}\n{mutant.diff()}")
            reasons += bool(reason)
    outcomes = Counter(fate.outcome for one in kept.mutants if (fate := kept.fate(one)) is not None)
    total = sum(outcomes.values())
    killed = outcomes["killed"]
    print(f"{package.name}: {killed} of {total} mutants killed, {killed / total:.1%}; {dict(outcomes)}")
    print(f"{reasons} of the others have a reason in tests/mutants/reasons.txt, {total - killed - reasons} have none")
    return int(killed < LEAST_SHARE * total or killed + reasons < total)


def run(waiting: list[Mutant], kept: Kept, name: str, folder: Path) -> None:
    with Workbench(PACKAGES[name], folder / name) as bench:
        recording = bench.record(folder / name / "recorded")
        for number, mutant in enumerate(waiting, start=1):
            fate = bench.run(mutant, recording)
            kept.add(mutant, fate)
            print(f"{number}/{len(waiting)} {fate.outcome:8} {mutant.name[:90]}  {fate.by[:60]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
