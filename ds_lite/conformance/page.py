"""The report as one page that needs nothing else: no script, no file beside it, nothing from elsewhere.

It is read on a phone as on a desk, in light and in dark. What it shows is the content of report.json.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape
from typing import Any

from ds_lite.conformance.page_style import STYLE

DECADES = 8  # a bar is full at the tolerance, empty so many powers of ten below

MARKS = {"passed": "✓", "in part": "✓", "failed": "✗", "not proved": "–"}
OPERATIONS = {
    "all_reduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "all_to_all": "all-to-all",
    "broadcast": "broadcast",
    "send_recv": "send, receive",
}


def page(content: dict[str, Any]) -> str:
    """The whole document, from what report.json holds."""
    failed = content["exit_status"] != 0
    body = [
        f"<header><h1>ds_lite conformance</h1><p class='verdict {'failed' if failed else 'passed'}'>",
        f"{escape(content['verdict'])}</p><p class='note'>{escape(_asked(content))}</p></header>",
        _summary(content["sections"]),
        _failures(content["sections"]),
        _machine(content["machine"]),
        _bandwidth(content["bandwidth"], content["why_no_bandwidth"]),
        "<h2>Rules</h2>",
        _legend(),
        *(_section(section) for section in content["sections"]),
    ]
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        "<meta name='color-scheme' content='light dark'>"
        f"<title>ds_lite conformance</title><style>{STYLE}</style></head>\n<body>"
        + "\n".join(part for part in body if part)
        + "</body></html>\n"
    )


def _asked(content: dict[str, Any]) -> str:
    asked = content["asked"]
    limit = "any number of ranks" if asked["nproc"] is None else f"at most {asked['nproc']} ranks"
    size = "every case" if asked["full"] else "the everyday cases"
    return (
        f"{content['when'].replace('T', ' ').replace('Z', ' UTC')} · {content['seconds']:.0f} s · "
        f"implementation {asked['impl']} · backend {asked['backend']} · {limit} · {size}"
    )


def _failures(sections: list[dict[str, Any]]) -> str:
    lines = {
        f"<li><code>{escape(one['case'])}</code><br>{escape(one['why'])}</li>": None
        for section in sections
        for rule in section["rules"]
        for one in rule["failures"]
    }
    return f"<h2>Failed</h2><ul class='failures'>{''.join(lines)}</ul>" if lines else ""


def _summary(sections: list[dict[str, Any]]) -> str:
    rows = [
        (
            f"<a href='#s{one['number']}'>§{one['number']} {escape(one['title'])}</a>",
            str(one["checked"]),
            str(one["passed"]),
            f"<b class='bad'>{one['failed']}</b>" if one["failed"] else "0",
            str(one["not_proved"]),
            _why_not(one),
        )
        for one in sections
    ]
    return "<h2>Sections</h2>" + _table(
        ("section", "rules", "passed", "failed", "not proved", "why: reason (cases)"),
        rows,
        kind="summary",
    )


def _why_not(one: dict[str, Any]) -> str:
    reasons = [f"{escape(reason)} ({number})" for reason, number in one["reasons"].items()]
    if one["not_reached"]:
        reasons.append(f"not reached ({one['not_reached']})")
    return "; ".join(reasons)


def _machine(machine: dict[str, str]) -> str:
    lines = "".join(f"<div><dt>{escape(n)}</dt><dd>{escape(v)}</dd></div>" for n, v in machine.items())
    return f"<h2>Machine</h2><dl>{lines}</dl>"


def _bandwidth(rates: list[dict[str, Any]], why_not: str) -> str:
    if not rates:
        return f"<h2>Bus bandwidth</h2><p class='note'>Not measured: {escape(why_not)}.</p>"
    head = (
        "<h2>Bus bandwidth</h2><p class='note'>GB/s by message size, tensors on "
        f"{'GPUs' if rates[0]['device'] == 'cuda' else 'CPUs'}. All groups of an axis work at the same time; "
        "the last rank counts, and the median of the repeats. Bus bandwidth is size / time, times 2(n-1)/n "
        "for all-reduce, (n-1)/n for reduce-scatter, all-gather and all-to-all, 1 for broadcast and send "
        "(NVIDIA/nccl-tests, doc/PERFORMANCE.md).</p>"
    )
    parts = []
    for axis in dict.fromkeys(rate["axis"] for rate in rates):
        own = [rate for rate in rates if rate["axis"] == axis]
        sizes = sorted({rate["size"] for rate in own})
        found = {(rate["operation"], rate["size"]): rate["bus"] for rate in own}
        rows = [
            (name, *(_three_digits(found[operation, size]) for size in sizes))
            for operation, name in OPERATIONS.items()
            if (operation, sizes[0]) in found
        ]
        where = "all ranks" if axis == "all ranks" else f"axis {axis}"
        table = _table(("collective", *map(_bytes, sizes)), rows, kind="rates")
        parts.append(f"<section><h3>{escape(where)}: groups of {own[0]['ranks']}</h3>{table}</section>")
    return f"{head}<div class='axes'>{''.join(parts)}</div>"


def _legend() -> str:
    return (
        "<p class='note'>A rule is one test function, a case one set of its parameters. Differences are the "
        "largest that were seen, relative to max(1, largest expected value), beside what the tolerance "
        f"allows; a full bar is the tolerance, an empty one {DECADES} powers of ten below.</p>"
    )


def _section(one: dict[str, Any]) -> str:
    rows = [
        (
            f"<span class='mark {rule['verdict'].replace(' ', '-')}'>{MARKS[rule['verdict']]}</span> "
            f"<span title='{escape(rule['name'])}'>{escape(rule['title'])}</span>{_reasons(rule)}",
            _cases(rule["cases"]),
            str(rule["ranks"] or ""),
            "".join(_difference(name, value) for name, value in rule["differences"].items()),
            f"{rule['seconds']:.1f}",
        )
        for rule in one["rules"]
    ]
    says = f"{one['passed']} of {one['checked']} passed" if one["checked"] else "nothing checked"
    bad = f" <b class='bad'>{one['failed']} failed</b>" if one["failed"] else ""
    table = _table(("rule", "cases", "ranks", "largest difference", "seconds"), rows, kind="rules")
    return (
        f"<details id='s{one['number']}'{' open' if one['failed'] else ''}><summary>"
        f"§{one['number']} {escape(one['title'])} · <span lang='zh'>{escape(one['chinese_title'])}</span> "
        f"<span class='note'>{says}</span>{bad}</summary>{table if rows else ''}</details>"
    )


def _reasons(rule: dict[str, Any]) -> str:
    said = [*rule["reasons"], *(one["why"] for one in rule["failures"][:3])]
    return "".join(f"<br><span class='note'>{escape(text)}</span>" for text in said)


def _cases(counts: dict[str, int]) -> str:
    ran = counts["passed"] + counts["failed"]
    total = ran + counts["skipped"]
    return f"{ran}" if ran == total else f"{ran} of {total}"


def _difference(name: str, value: dict[str, Any]) -> str:
    largest, allowed = float(value["largest"]), float(value["allowed"])
    fits = largest <= allowed
    shown = "0" if largest == 0 else f"{largest:.1e}"
    beside = f"{shown} of {allowed:.0e}" if allowed else shown
    bar = ""
    if allowed:  # nothing to draw where nothing is allowed
        share = max(0.0, 1 + math.log10(largest / allowed) / DECADES) if largest else 0.0
        bar = f"<i><i style='width:{min(1.0, share):.0%}'></i></i>"
    return f"<span class='difference{'' if fits else ' bad'}'><b>{escape(name)}</b> {beside}{bar}</span>"


def _table(headings: Iterable[str], rows: Iterable[tuple[str, ...]], *, kind: str) -> str:
    """Cells are HTML already; each carries its heading, which a narrow screen shows in front of it."""
    names = list(headings)
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    lines = "".join(
        "<tr>" + "".join(f"<td data-name='{escape(n)}'>{cell}</td>" for n, cell in zip(names, row)) + "</tr>"
        for row in rows
    )
    return f"<table class='{kind}'><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"


def _three_digits(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def _bytes(size: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << power:
            return f"{size / (1 << power):g} {unit}"
    return f"{size} B"
