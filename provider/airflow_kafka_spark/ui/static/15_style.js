// Styles in Airflow's colours. They depend on the width of the page, which may be a tab, not on that of the screen.

const STYLE = `
.aks { container-type: inline-size; height: 100%; overflow: auto; padding: 12px; font-size: 14px; color: var(--chakra-colors-fg); box-sizing: border-box; }
.aks *, .aks-dialog * { box-sizing: border-box; }
.aks a, .aks-dialog a { color: var(--chakra-colors-fg-info); text-decoration: none; }
.aks a:hover, .aks-dialog a:hover { text-decoration: underline; }
.aks :focus-visible, .aks-dialog :focus-visible { outline: 2px solid var(--chakra-colors-border-info); outline-offset: 1px; }
.aks-muted { color: var(--chakra-colors-fg-muted); }
.aks-small { font-size: 12px; }
.aks-close { line-height: 1.35; }
.aks-name, .aks-name *, .aks-clamp *, .aks-facts dd * { overflow-wrap: anywhere; }
.aks-strong { font-weight: 600; }
.aks-error { color: var(--chakra-colors-fg-error); }
.aks-warning { color: var(--chakra-colors-fg-warning); }
.aks-clamp { display: -webkit-box; -webkit-line-clamp: 2; -webkit-box-orient: vertical; overflow: hidden; overflow-wrap: anywhere; }
.aks-clamp.aks-lines { -webkit-line-clamp: 5; }
.aks-row { display: flex; flex-wrap: wrap; gap: 8px; align-items: center; }
.aks-between { display: flex; flex-wrap: wrap; gap: 8px 16px; align-items: flex-start; justify-content: space-between; }
.aks-stack { display: flex; flex-direction: column; gap: 12px; min-width: 0; }
.aks-heading { font-size: 18px; font-weight: 600; line-height: 1.3; }
.aks-sub { font-size: 14px; font-weight: 600; }
.aks-plain { background: none; border: 0; padding: 0; margin: 0; font: inherit; color: inherit; cursor: pointer; text-align: inherit; }
.aks-chip { display: inline-flex; gap: 6px; align-items: center; border: 1px solid var(--chakra-colors-border); border-radius: 4px; padding: 3px 10px; font-size: 13px; background: transparent; color: inherit; cursor: pointer; }
.aks-chip:hover { background: var(--chakra-colors-bg-muted); }
.aks-chip[aria-pressed=true] { background: var(--chakra-colors-brand-solid); color: var(--chakra-colors-brand-contrast); border-color: transparent; }
.aks-check { margin: 3px 0 0; flex: none; width: 15px; height: 15px; cursor: pointer; accent-color: var(--chakra-colors-brand-solid); }
.aks-dot { width: 8px; height: 8px; border-radius: 50%; flex: none; display: inline-block; }
.aks-table { width: 100%; border-collapse: collapse; }
.aks-table th { font-weight: 500; text-align: left; padding: 6px 8px; border-bottom: 1px solid var(--chakra-colors-border); white-space: nowrap; vertical-align: bottom; }
.aks-table td { padding: 6px 8px; border-bottom: 1px solid var(--chakra-colors-border); vertical-align: top; }
.aks-table tbody tr.aks-odd { background: var(--chakra-colors-bg-muted); }
.aks-table tbody tr.aks-marked { box-shadow: inset 3px 0 0 var(--chakra-colors-border-info); }
.aks-table .aks-num { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.aks-table .aks-full { padding: 10px 12px 14px; }
.aks-scroll { overflow-x: auto; }
.aks-facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 10px 16px; margin: 0; }
.aks-facts > .aks-long { grid-column: span 2; }
.aks-facts dt { font-size: 12px; color: var(--chakra-colors-fg-muted); }
.aks-facts dd { margin: 0; overflow-wrap: anywhere; }
.aks-panel { border: 1px solid var(--chakra-colors-border); border-radius: 6px; padding: 10px 12px; min-width: 0; }
.aks-panels { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 12px; }
.aks-whole { grid-column: 1 / -1; }
.aks-bar { height: 6px; border-radius: 3px; background: var(--chakra-colors-bg-emphasized); overflow: hidden; }
.aks-bar > div { height: 100%; background: var(--chakra-colors-running-solid); transition: width 1s linear; }
.aks-bar.aks-unknown > div { width: 30%; animation: aks-slide 1.6s ease-in-out infinite alternate; }
@keyframes aks-slide { from { margin-left: 0; } to { margin-left: 70%; } }
.aks-note { border: 1px solid; border-radius: 6px; padding: 8px 12px; overflow-wrap: anywhere; }
.aks-note.aks-bad { background: var(--chakra-colors-bg-error); border-color: var(--chakra-colors-border-error); }
.aks-note.aks-warn { background: var(--chakra-colors-bg-warning); border-color: var(--chakra-colors-border-warning); }
.aks-note.aks-info { background: var(--chakra-colors-bg-info); border-color: var(--chakra-colors-border-info); }
.aks-note.aks-good { background: var(--chakra-colors-bg-success); border-color: var(--chakra-colors-border-success); }
.aks-pre { margin: 0; padding: 6px 8px; border-radius: 4px; background: var(--chakra-colors-bg-muted); font-family: var(--chakra-fonts-mono, monospace); font-size: 12px; white-space: pre-wrap; overflow-wrap: anywhere; max-height: 320px; overflow-y: auto; }
.aks-chart { display: block; width: 100%; }
.aks-chart text { font-size: 11px; fill: var(--chakra-colors-fg-muted); }
.aks-chart .aks-axis { stroke: var(--chakra-colors-border); shape-rendering: crispEdges; }
.aks-chart .aks-over { fill: transparent; }
.aks-chart .aks-over:hover { fill: var(--chakra-colors-fg); fill-opacity: .06; }
.aks-legend { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 12px; color: var(--chakra-colors-fg-muted); min-height: 18px; }
.aks-legend b { font-weight: 600; color: var(--chakra-colors-fg); font-variant-numeric: tabular-nums; }
.aks-swatch { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 5px; }
.aks-partition { display: block; width: 100%; height: 14px; }
.aks-hidden { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
.aks-tabs { display: flex; position: relative; overflow-x: auto; border-bottom: 1px solid var(--chakra-colors-border-emphasized); }
.aks-tabs button { background: none; border: 0; border-bottom: 3px solid transparent; padding: 6px 14px; font-weight: 600; color: var(--chakra-colors-fg-muted); white-space: nowrap; cursor: pointer; }
.aks-tabs button[aria-selected=true] { border-bottom-color: var(--chakra-colors-border-info); color: var(--chakra-colors-fg); }
.aks-tabs button:hover { color: var(--chakra-colors-fg); }
@container (max-width: 760px) {
  .aks-panels { grid-template-columns: minmax(0, 1fr); }
  .aks-wide-only { display: none; }
  .aks-cards, .aks-cards > tbody, .aks-cards > tbody > tr > td { display: block; width: 100%; }
  .aks-cards > thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
  .aks-cards > tbody > tr { display: grid; grid-template-columns: repeat(6, minmax(0, 1fr)); border: 1px solid var(--chakra-colors-border); border-radius: 6px; margin-bottom: 8px; padding: 4px 0; }
  .aks-cards > tbody > tr > td { border: 0; padding: 3px 10px; grid-column: span 3; }
  .aks-cards > tbody > tr > td.aks-third { grid-column: span 2; }
  .aks-facts { grid-template-columns: repeat(2, minmax(0, 1fr)); }
  .aks-facts > .aks-long { grid-column: 1 / -1; }
  .aks-cards > tbody > tr > td.aks-num { text-align: left; white-space: normal; }
  .aks-cards > tbody > tr > td::before { content: attr(data-label); display: block; font-size: 11px; color: var(--chakra-colors-fg-muted); }
  .aks-cards > tbody > tr > td.aks-full, .aks-cards > tbody > tr > td.aks-lead, .aks-cards > tbody > tr > td.aks-wide { grid-column: 1 / -1; }
  .aks-cards > tbody > tr > td.aks-full::before, .aks-cards > tbody > tr > td.aks-lead::before { content: none; }
}
@media (prefers-reduced-motion: reduce) { .aks-bar > div { transition: none; animation: none !important; } }
`;
