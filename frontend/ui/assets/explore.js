// The prefix explorer: a prompt, who holds which of its blocks, and where it would go.
import { $, bar, count, el, key, plural, TIERS } from './dom.js';
import { post } from './feed.js';

const form = $('explore');
form.addEventListener('submit', (e) => {
  e.preventDefault();
  explore();
});
$('prompt').addEventListener('keydown', (e) => {
  if (e.key === 'Enter' && (e.ctrlKey || e.metaKey)) {
    e.preventDefault();
    form.requestSubmit();
  }
});

// offerModels fills in what can be asked for.
export function offerModels(workers) {
  const names = [...new Set(workers.flatMap((w) => w.models))].sort();
  if ($('models').dataset.shown === names.join('\n')) return;
  $('models').dataset.shown = names.join('\n');
  $('models').replaceChildren(...names.map((n) => el('option', { value: n })));
  if (!$('model').value && names.length) $('model').value = names[0];
}

// read says what the text is.
function read(text, kind) {
  let json;
  try {
    json = JSON.parse(text);
  } catch { /* a prompt, or numbers without brackets */ }
  const numbers = (list) => list.every((n) => Number.isInteger(n) && n >= 0 && n < 2 ** 32);
  if (kind === 'tokens') {
    const list = Array.isArray(json) ? json : text.split(/[\s,]+/).filter(Boolean).map(Number);
    if (!list.length || !numbers(list)) throw new Error('Token ids are whole numbers, separated by commas or spaces.');
    return { tokens: list, what: 'token ids' };
  }
  if (kind === 'messages' && !Array.isArray(json)) throw new Error('Messages are a JSON array, as in a chat request.');
  if (kind === 'prompt') return { body: { prompt: text }, what: 'a prompt' };
  if (kind === 'messages') return { body: { messages: json }, what: 'messages' };
  if (Array.isArray(json) && json.length && numbers(json)) return { tokens: json, what: 'token ids' };
  if (Array.isArray(json) && json.length && json.every((m) => m && typeof m === 'object')) return { body: { messages: json }, what: 'messages' };
  if (json && typeof json === 'object' && json.messages) {
    const { messages, tools } = json;
    return { body: tools ? { messages, tools } : { messages }, what: 'a chat request', request: json };
  }
  if (json && typeof json === 'object' && json.prompt !== undefined) {
    if (Array.isArray(json.prompt)) return { tokens: json.prompt, what: 'a request with token ids', request: json };
    return { body: { prompt: json.prompt }, what: 'a completion request', request: json };
  }
  return { body: { prompt: text }, what: 'a prompt' };
}

async function explore() {
  const out = $('explored'), button = form.querySelector('button');
  button.disabled = true;
  out.setAttribute('aria-busy', 'true');
  try {
    const input = read($('prompt').value, $('kind').value);
    const model = input.request?.model ?? $('model').value;
    const tokens = input.tokens ?? (await post('tokenize', { model, ...input.body })).tokens;
    if (!tokens?.length) throw new Error('The engine answers no token ids.');
    const answer = await post('ui/explore', {
      model, tenant_id: $('tenant').value || undefined, token_ids: tokens,
      cache_salt: (input.request?.cache_salt ?? $('salt').value) || undefined, lora_name: $('lora').value || undefined,
    });
    show(out, answer, tokens.length, input.what);
  } catch (e) {
    out.replaceChildren(el('p', { class: 'error', role: 'alert' }, String(e.message)));
  } finally {
    button.disabled = false;
    out.removeAttribute('aria-busy');
  }
}

// runsOf turns one digit per block into runs. A block that is missing before one that is held is a hole.
function runsOf(digits, blocks) {
  const last = Math.max(...[...digits].map((d, i) => (d === '0' ? -1 : i)));
  const runs = [];
  const holes = [];
  for (let i = 0; i < digits.length; i++) {
    const bits = parseInt(digits[i], 16);
    const tier = bits ? TIERS[Math.log2(bits & -bits)] : i < last ? 'hole' : '';
    if (tier === 'hole') holes.push(i);
    if (runs.length && runs.at(-1)[0] === tier) runs.at(-1)[1]++;
    else runs.push([tier, 1]);
  }
  runs.push(['', blocks - digits.length]);
  return { runs, holes };
}

function ranges(list) {
  const out = [];
  for (const n of list) {
    if (out.length && out.at(-1)[1] === n - 1) out.at(-1)[1] = n;
    else out.push([n, n]);
  }
  const shown = out.slice(0, 4).map(([a, b]) => (a === b ? `${a}` : `${a}–${b}`)).join(', ');
  return out.length > 4 ? `${shown}, …` : shown;
}

const HEAD = ['Worker', 'Blocks of the prompt', 'Overlap', 'Cost', 'Under way there'];

function show(out, a, tokens, what) {
  const blocks = a.shown_blocks || a.prompt_blocks;
  const digits = new Map(a.holders.map((h) => [`${h.worker_id}/${h.dp_rank}`, h.tiers]));
  const body = el('tbody');
  const add = (name, c, winner) => {
    const held = digits.get(name) ?? '';
    const { runs, holes } = runsOf(held, blocks);
    const by = TIERS.map((t) => [t, runs.reduce((n, [r, k]) => (r === t ? n + k : n), 0)]).filter(([, n]) => n);
    const says = [...by.map(([t, n]) => `${count(n)} ${t}`), holes.length && `${plural(holes.length, 'hole')}: ${ranges(holes)}`].filter(Boolean).join(', ') || 'none of them';
    const known = a.index_state === 'exact' || held;
    const row = el('tr', { 'data-worker': name, ...(winner ? { class: 'winner' } : {}) }, el('th', { scope: 'row' }, name),
      el('td', { class: 'wide', 'data-label': HEAD[1] }, known ? bar(runs, blocks, says, 'long') : 'unknown', ...(known ? [el('small', {}, says)] : [])),
      el('td', { 'data-label': HEAD[2] }, c?.overlap ? `${count(c.overlap.any)} of ${count(a.prompt_blocks)}` : c ? 'unknown' : '–'),
      el('td', { 'data-label': HEAD[3] }, c?.cost === undefined ? (c ? '–' : 'not a candidate') : c.cost.toFixed(1)),
      el('td', { 'data-label': HEAD[4] }, c ? plural(c.requests, 'request') : '–'));
    body.append(row);
    digits.delete(name);
  };
  a.candidates.forEach((c, i) => add(`${c.worker_id}/${c.dp_rank}`, c, i === 0));
  for (const name of [...digits.keys()]) add(name, null, false);
  const shown = a.shown_blocks && a.shown_blocks < a.prompt_blocks ? `, of which the first ${count(a.shown_blocks)} are drawn` : '';
  const parts = [
    el('p', { id: 'verdict' }, verdict(a)),
    el('p', { class: 'dim' }, `Read as ${what}: ${plural(tokens, 'token')}, ${plural(a.prompt_blocks, 'full block')} of ${a.block_size}${shown}. Index: ${a.index_state}.`),
  ];
  if (a.holders_problem) parts.push(el('p', { class: 'error' }, `Single blocks cannot be read in full: ${a.holders_problem}.`));
  parts.push(el('table', {}, el('thead', {}, el('tr', {}, ...HEAD.map((h) => el('th', { scope: 'col' }, h)))), body),
    el('p', { class: 'legend' }, ...TIERS.map((t) => key(`f-${t}`, t)), key('f-hole', 'hole'), key('f-empty', 'not held')));
  out.replaceChildren(...parts);
}

// verdict says where the prompt would go, and why.
function verdict(a) {
  const [best, next] = a.candidates;
  const name = `${best.worker_id}/${best.dp_rank}`;
  if (a.cause) return `Nobody knows who holds what (${a.cause}): the fallback ${a.policy} would choose ${name}, by ${a.reason}.`;
  const why = {
    overlap: `it holds ${best.overlap ? count(best.overlap.any) : '?'} of ${plural(a.prompt_blocks, 'block')}`,
    load: 'no candidate is cheaper by what it holds: it has the least to do', session: 'the session is there', pinned: 'the request names it',
  }[a.reason] ?? `reason ${a.reason}`;
  const cost = best.cost === undefined || next?.cost === undefined ? '' : ` Its cost is ${best.cost.toFixed(1)}, the next one's ${next.cost.toFixed(1)}.`;
  return `${name} would be chosen: ${why}.${cost}`;
}
