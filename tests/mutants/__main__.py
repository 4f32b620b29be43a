"""Run every mutant against the test that must kill it, and count: `make mutants`.

    python tests/mutants [--sections 9.12,9.15]

killed       died of the test it names, for the reason it names
survived     that test passes with the fault in the engine: a rule is not tested
another      died of something else than the reason it names
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE.parent)]

from test_mutants import MUTANTS  # noqa: E402

OUTCOMES = ("killed", "survived", "another")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sections", help="numbers with commas, e.g. 9.12,9.15; all by default")
    parser.add_argument("--jobs", default="auto", help="processes of pytest-xdist")
    given = parser.parse_args()
    wanted = given.sections.split(",") if given.sections else None
    chosen = [mutant for mutant in MUTANTS if wanted is None or mutant.section in wanted]
    if not chosen:
        print(f"no mutant of {given.sections}; there are {sorted({m.section for m in MUTANTS})}")
        return 2
    outcomes = run({mutant.name for mutant in chosen}, given.jobs)
    table = {section: Counter[str]() for section in sorted({m.section for m in chosen}, key=_number)}
    for mutant in chosen:
        table[mutant.section][outcomes.get(mutant.name, "not run")] += 1
    print(f"{'section':<9}" + "".join(f"{word:>10}" for word in OUTCOMES))
    for section, counts in table.items():
        print(f"{section:<9}" + "".join(f"{counts[word]:>10}" for word in OUTCOMES))
    for mutant in chosen:
        if outcomes.get(mutant.name) != "killed":
            outcome = outcomes.get(mutant.name, "not run")
            print(f"{outcome}: {mutant.name}. {mutant.breaks} ({mutant.killer})")
    return int(any(outcomes.get(mutant.name) != "killed" for mutant in chosen))


def run(names: set[str], jobs: str) -> dict[str, str]:
    """What became of each mutant, by name."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        ids = [f"{HERE.parent / 'test_mutants.py'}::test_a_mutant_dies[{name}]" for name in sorted(names)]
        command = [sys.executable, "-m", "pytest", "--full", "--quiet", "--numprocesses", jobs]
        subprocess.run([*command, "--dist", "loadgroup", f"--junitxml={report}", *ids], check=False)
        cases = ElementTree.parse(report).iter("testcase")
        return {case.get("name", "").partition("[")[2].rstrip("]"): _outcome(case) for case in cases}


def _outcome(case: ElementTree.Element) -> str:
    fault = case.find("failure")
    fault = case.find("error") if fault is None else fault
    if fault is None:
        return "killed" if case.find("skipped") is None else "not run"
    return "survived" if " lives: " in (fault.get("message") or "") else "another"


def _number(section: str) -> list[int]:
    return [int(part) for part in section.split(".")]


if __name__ == "__main__":
    sys.exit(main())
