// The table of workers and ranks.
import { $, bar, count, el, key, percent, plural, span, text, TIERS } from './dom.js';

const COLUMNS = ['State', 'Blocks by tier', 'Load', 'Hit ratio', 'Requests/s', 'Generation', 'Watermark', 'Gaps / resets', 'Lag', 'Models'];
const rows = new Map();

$('tiers').append(...TIERS.map((t) => key(`f-${t}`, t)));

export function showWorkers(m) {
  const seen = new Set();
  const all = m.workers.flatMap((w) => w.ranks.map((r) => ({ w, r, blocks: sum(r.streams) })));
  const most = Math.max(1, ...all.map(({ blocks }) => TIERS.reduce((n, t) => n + blocks[t], 0)));
  let before = null;
  for (const { w, r, blocks } of all) {
    const id = `${w.tenant_id}\n${w.id}\n${r.dp_rank}`;
    seen.add(id);
    let row = rows.get(id);
    if (!row) {
      row = el('tr', { 'data-worker': `${w.id}/${r.dp_rank}` }, el('th', { scope: 'row' }), ...COLUMNS.map((c) => el('td', { 'data-label': c })));
      rows.set(id, row);
    }
    if (row.previousSibling !== before || row.parentNode === null) before ? before.after(row) : $('ranks').prepend(row);
    before = row;
    fill(row, m, w, r, blocks, most);
  }
  for (const [id, row] of rows) {
    if (!seen.has(id)) {
      row.remove();
      rows.delete(id);
    }
  }
  $('no-workers').hidden = all.length > 0;
  const read = m.index.read;
  const late = m.index.read_error ? `, now they cannot be read: ${m.index.read_error}` : '';
  const age = read ? (Date.parse(m.time) - Date.parse(read)) / 1000 : 0;
  text($('asof'), read ? (late || age > 6 ? `blocks and streams as of ${span(age)} ago${late}` : '') : m.index.state === 'bypassed' ? '' : `blocks and streams not read yet${late}`);
  return all.reduce((n, { blocks }) => n + TIERS.slice(0, 3).reduce((k, t) => k + blocks[t], 0), 0);
}

function sum(streams) {
  const out = Object.fromEntries(TIERS.map((t) => [t, 0]));
  for (const s of streams) for (const t of TIERS) out[t] += s.blocks[t];
  return out;
}

function fill(row, m, w, r, blocks, most) {
  const [name, state, tiers, load, hits, rate, generation, watermark, resets, lag, models] = row.children;
  text(name, `${w.id}/${r.dp_rank}${w.tenant_id === 'default' ? '' : ` (${w.tenant_id})`}`);
  name.title = [w.url, w.engine, w.source && `from ${w.source}`].filter(Boolean).join(', ');
  const cause = w.cause || '';
  if (state.dataset.shown !== w.state + cause) {
    state.dataset.shown = w.state + cause;
    const word = w.state === 'open' ? 'breaker open' : w.state;
    state.replaceChildren(el('span', { class: 'tag', 'data-state': w.state }, word), ...(cause ? [el('small', {}, cause)] : []));
  }
  const drawn = JSON.stringify([blocks, most, r.streams.length]);
  if (tiers.dataset.shown !== drawn) {
    tiers.dataset.shown = drawn;
    const parts = TIERS.filter((t) => blocks[t] > 0).map((t) => `${count(blocks[t])} ${t}`);
    const label = r.streams.length === 0 ? '–' : parts.join(', ') || 'none';
    tiers.replaceChildren(bar(TIERS.map((t) => [t, blocks[t]]), most, label), el('small', {}, label));
  }
  text(load, r.shared_load ? `${r.load.requests} / ${r.shared_load.requests}` : `${r.load.requests}`);
  load.title = `${plural(r.load.prefill_tokens, 'token')} waiting for prefill, ${plural(r.load.decode_blocks, 'block')} in use`;
  text(hits, percent(r.hit_ratio));
  text(rate, r.requests_per_second.toFixed(1));
  const s = r.streams;
  text(generation, s.map((x) => `${x.generation}${x.epoch && x.epoch !== x.generation ? ', after a gap or a clear' : ''}`).join(', ') || '–');
  text(watermark, s.map((x) => (x.watermark < 0 ? 'none yet' : count(x.watermark))).join(', ') || (m.index.read ? 'no KV events' : '–'));
  text(resets, s.map((x) => `${x.breaks} / ${x.restarts}`).join(', ') || '–');
  text(lag, s.map((x) => span((Date.parse(m.time) - Date.parse(x.updated)) / 1000)).join(', ') || '–');
  text(models, w.models.join(', '));
}
