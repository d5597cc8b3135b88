// The last choices, newest first, each with its explanation.
import { $, clock, count, el, micros, plural } from './dom.js';

const KEPT = 64;
let newest = 0;
let paused = false;
let waiting = [];

$('pause').addEventListener('click', () => {
  paused = !paused;
  $('pause').setAttribute('aria-pressed', String(paused));
  if (!paused) add(waiting.splice(0));
});

export function showDecisions(list) {
  const fresh = list.filter((d) => d.seq > newest);
  if (fresh.length) newest = fresh.at(-1).seq;
  if (!paused) return add(fresh);
  waiting = [...waiting, ...fresh].slice(-KEPT);
}

// forget is for a frontend that has begun anew.
export function forgetDecisions() {
  newest = 0;
  waiting = [];
  $('choices').replaceChildren();
}

function add(list) {
  const ol = $('choices');
  for (const d of list) ol.prepend(item(d));
  while (ol.children.length > KEPT) ol.lastChild.remove();
  $('no-decisions').hidden = ol.children.length > 0;
}

function item(d) {
  const x = d.explanation ?? { policy: '', reason: '', candidates: [] };
  const overlap = d.overlap_known ? `${count(d.overlap_blocks)} of ${plural(d.prompt_blocks, 'block')}` : 'overlap unknown';
  const state = el('span', { class: 'tag', 'data-state': d.index_state }, d.index_state);
  const cols = el('span', { class: 'cols' }, el('span', {}, clock(d.time)), el('strong', {}, `${d.worker_id}/${d.dp_rank}`),
    el('span', {}, x.reason), el('span', {}, overlap), state, el('span', {}, `index ${micros(d.index_ns / 1000)}`));
  const details = el('details', { 'data-seq': d.seq }, el('summary', {}, cols));
  details.addEventListener('toggle', () => {
    if (details.open && details.children.length === 1) details.append(el('div', {}, ...explanation(d, x)));
  });
  return el('li', {}, details);
}

function explanation(d, x) {
  const facts = [
    `${d.model}, ${d.endpoint}`, `policy ${x.policy}, reason ${x.reason}`, x.shared_loads ? 'loads of all frontends' : "this frontend's own loads",
    d.cause && `without overlaps: ${d.cause}`, d.retry > 0 && `${plural(d.retry, 'worker')} tried before`,
    d.route_ns > 0 && `chosen ${micros(d.route_ns / 1000)} after the body was there`,
  ].filter(Boolean);
  return [el('p', { class: 'dim' }, facts.join(' · ')), candidates(x)];
}

const HEAD = ['Candidate', 'Cost', 'Device', 'Host', 'Disk', 'Predicted too', 'Requests', 'Waiting prefill, tokens', 'Blocks in use'];

export function candidates(x) {
  const body = el('tbody');
  x.candidates.forEach((c, i) => {
    const o = c.overlap;
    const cells = [c.cost === undefined ? '–' : c.cost.toFixed(1), ...(o ? [o.device, o.host, o.disk, o.any] : ['?', '?', '?', '?']), c.requests, c.prefill_tokens, c.decode_blocks];
    body.append(el('tr', i === 0 ? { class: 'winner' } : {}, el('th', { scope: 'row' }, `${c.worker_id}/${c.dp_rank}`),
      ...cells.map((v, n) => el('td', { 'data-label': HEAD[n + 1] }, typeof v === 'number' ? count(v) : v))));
  });
  const table = el('table', {}, el('thead', {}, el('tr', {}, ...HEAD.map((h) => el('th', { scope: 'col' }, h)))), body);
  return x.omitted ? el('div', {}, table, el('p', { class: 'dim' }, `and ${plural(x.omitted, 'more candidate')}`)) : table;
}
