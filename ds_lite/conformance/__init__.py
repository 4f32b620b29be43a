"""§9.1-9.16 The suite run for people: does every parallel path on this machine compute what one process does?

`command.py` is `ds-lite conformance`; `asked.py` checks what was typed, `running.py` starts pytest with
`plugin.py` inside and reads its events, `results.py` adds them up, `table.py` shows them, `report.py` and
`page.py` write the report, for which `machine.py` and `bandwidth.py` look at the machine.
"""
