"""The report folder: report.json, junit.xml, report.html; beside them what pytest printed, pytest.txt.

The page shows what the JSON holds, so that two machines can be compared with either.
"""

from __future__ import annotations

import json
import math
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ds_lite.conformance.asked import Asked
from ds_lite.conformance.bandwidth import Rate
from ds_lite.conformance.page import page
from ds_lite.conformance.results import Results, Rule, SectionResults
from ds_lite.conformance.table import verdict

FORMAT = 1  # grows when a field changes its meaning


def write(
    folder: Path,
    asked: Asked,
    results: Results,
    machine: dict[str, str],
    rates: Sequence[Rate],
    *,
    why_no_rates: str = "",
) -> Path:
    """Fill the folder in which the run has left junit.xml; the path of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    content = as_dict(asked, results, machine, rates, why_no_rates=why_no_rates)
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    (folder / "report.json").write_text(text + "\n", encoding="utf-8")
    clean_junit(folder / "junit.xml", asked.root, machine.get("host", ""))
    path = folder / "report.html"
    path.write_text(page(content), encoding="utf-8")
    return path


def as_dict(
    asked: Asked,
    results: Results,
    machine: dict[str, str],
    rates: Sequence[Rate],
    *,
    why_no_rates: str = "",
) -> dict[str, Any]:
    """What report.json holds: plain values only; an infinite difference is the string "inf"."""
    return {
        "format": FORMAT,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(results.started)),
        "seconds": round(time.time() - results.started, 1),
        "asked": {
            "sections": [section.number for section in asked.sections],
            "nproc": asked.nproc,
            "backend": asked.backend,
            "impl": Path(asked.impl).name,
            "full": asked.full,
        },
        "exit_status": results.exit_status,
        "verdict": verdict(results),
        "machine": machine,
        "sections": [_section(one) for one in results.sections.values()],
        "bandwidth": [asdict(rate) for rate in rates],
        "why_no_bandwidth": why_no_rates,
    }


def _section(one: SectionResults) -> dict[str, Any]:
    return {
        "number": one.section.number,
        "title": one.section.title,
        "chinese_title": one.section.chinese_title,
        "checked": one.count("passed", "in part", "failed"),
        "passed": one.count("passed", "in part"),
        "failed": one.count("failed"),
        "not_proved": one.count("not proved"),
        "reasons": dict(one.reasons().most_common()),
        "not_reached": max(0, sum(one.expected.values()) - len(one.cases())),
        "rules": [_rule(rule) for rule in one.rules.values()],
    }


def _rule(rule: Rule) -> dict[str, Any]:
    outcomes = [case.outcome for case in rule.cases]
    return {
        "name": rule.name,
        "title": rule.title,
        "verdict": rule.verdict,
        "cases": {outcome: outcomes.count(outcome) for outcome in ("passed", "failed", "skipped")},
        "ranks": rule.ranks,
        "seconds": round(rule.seconds, 3),
        "differences": {
            name: {"largest": _plain(one.largest), "allowed": one.allowed}
            for name, one in sorted(rule.differences().items())
        },
        "failures": [
            {"case": case.nodeid, "why": case.why} for case in rule.cases if case.outcome == "failed"
        ],
        "reasons": sorted({case.why for case in rule.cases if case.outcome == "skipped"}),
    }


def _plain(number: float) -> float | str:
    return number if math.isfinite(number) else "inf"


def clean_junit(path: Path, root: Path, host_name: str) -> None:
    """Take out of pytest's file what says where it was made: the machine's name, the suite's folder."""
    if not path.exists():  # the run was ended before pytest could write it
        return
    tree = ET.parse(path)
    for element in tree.iter():
        if "hostname" in element.attrib:
            element.set("hostname", host_name)
        for name, value in element.attrib.items():
            element.set(name, value.replace(f"{root}/", ""))
        if element.text:
            element.text = element.text.replace(f"{root}/", "")
    tree.write(path, encoding="utf-8", xml_declaration=True)
