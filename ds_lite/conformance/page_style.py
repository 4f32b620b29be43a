"""How the report's page looks. On a narrow screen each row of a wide table becomes a card."""

STYLE = """
:root { --paper: #fff; --ink: #1c2127; --dim: #5b6570; --line: #d9dee3; --soft: #f3f5f7;
  --good: #18703a; --bad: #b3261e; --bar: #3c78b4; --link: #1a5fa8; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #15181c; --ink: #e4e7ea; --dim: #9aa4ae; --line: #343b43; --soft: #1e2328;
    --good: #6cc98a; --bad: #ff8a80; --bar: #6aa5dc; --link: #8cbcf0; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0 auto; padding: 1.25rem 1rem 4rem; max-width: 76rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "Noto Sans", sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { font-size: 1.2rem; margin: 2.25rem 0 .75rem; }
h3 { font-size: 1rem; margin: 1.25rem 0 .4rem; }
a { color: var(--link); }
code { font: .875em/1.4 ui-monospace, "SF Mono", Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.note { color: var(--dim); font-size: .875rem; font-weight: normal; }
.verdict { margin: 0 0 .25rem; padding: .6rem .8rem; background: var(--soft);
  border-left: .3rem solid var(--good); font-weight: 600; }
.verdict.failed { border-color: var(--bad); }
.bad { color: var(--bad); }
.failures { padding-left: 1.1rem; } .failures li { margin-bottom: .6rem; overflow-wrap: anywhere; }
.failures li::marker { color: var(--bad); }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(21rem, 100%), 1fr));
  gap: 0 1.5rem; margin: 0; }
dl div { display: flex; gap: .75rem; padding: .35rem 0; border-top: 1px solid var(--line); }
dt { color: var(--dim); flex: 0 0 6.5rem; } dd { margin: 0; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; font-size: .8125rem; color: var(--dim); font-weight: 600; vertical-align: bottom; }
th, td { padding: .4rem .75rem .4rem 0; border-bottom: 1px solid var(--line); }
td { vertical-align: top; overflow-wrap: break-word; }
.axes { display: grid; gap: 0 2.5rem;
  grid-template-columns: repeat(auto-fill, minmax(min(20rem, 100%), 1fr)); }
.rates td:not(:first-child), .rates th:not(:first-child) { text-align: right; }
.summary td:nth-child(n+2):nth-child(-n+5), .summary th:nth-child(n+2):nth-child(-n+5),
.rules td:nth-child(2), .rules th:nth-child(2), .rules td:nth-child(3), .rules th:nth-child(3),
.rules td:last-child, .rules th:last-child { text-align: right; white-space: nowrap; }
.summary td:last-child { font-size: .875rem; max-width: 28rem; }
.summary td:last-child, .summary th:last-child { padding-left: .75rem; }
.rules td:nth-child(4) { width: 17rem; }
.rules td:nth-child(4), .rules th:nth-child(4) { padding-left: .75rem; }
details { border-top: 1px solid var(--line); }
details[open] { padding-bottom: 1rem; }
summary { cursor: pointer; padding: .6rem 0; font-weight: 600; }
.mark { font-weight: 700; color: var(--good); } .mark.failed { color: var(--bad); }
.mark.not-proved { color: var(--dim); }
.difference { display: block; font-size: .875rem; white-space: nowrap; }
.difference b { display: inline-block; min-width: 3.4rem; font-weight: 600; }
.difference > i { display: block; height: 3px; margin: 1px 0 4px; background: var(--line); }
.difference > i > i { display: block; height: 3px; background: var(--bar); }
.difference.bad > i > i { background: var(--bad); }
@media (max-width: 44rem) {
  .summary thead, .rules thead { display: none; }
  .summary, .rules, .summary tbody, .rules tbody { display: block; }
  .summary tr, .rules tr { display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; padding: .6rem 0;
    border-bottom: 1px solid var(--line); }
  .summary td, .rules td { border: 0; padding: 0 !important; width: auto !important;
    max-width: none !important;
    text-align: left !important; white-space: normal !important; }
  .summary td:first-child, .summary td:last-child, .rules td:first-child, .rules td:nth-child(4)
    { flex-basis: 100%; }
  .rules td:nth-child(4) { order: 9; }
  .summary td:empty, .rules td:empty { display: none; }
  .summary td:nth-child(n+2):nth-child(-n+5), .rules td:nth-child(2), .rules td:nth-child(3),
  .rules td:last-child { font-size: .875rem; }
  .summary td:nth-child(n+2):nth-child(-n+5)::before, .rules td:nth-child(2)::before,
  .rules td:nth-child(3)::before, .rules td:last-child::before
    { content: attr(data-name) " "; color: var(--dim); }
}
@media print { details { break-inside: avoid; } }
"""
