import { $, clock, count, el, micros, percent, span, text } from './dom.js';
import { forgetDecisions, showDecisions } from './decisions.js';
import { offerModels } from './explore.js';
import { follow } from './feed.js';
import { Plots } from './plots.js';
import { showWorkers } from './workers.js';

const KEPT = 300;
const plots = new Plots($('plots'));
let samples = [];
let instance = null;

const MEANING = {
  exact: 'requests go where their prefix is warm',
  partial: 'some shards are away: their workers’ blocks are unknown',
  degraded: 'the index is away: requests are served by the fallback',
  bypassed: 'there is no index: requests are served by the fallback',
};

function show(m) {
  if (m.error) return lost(m.error);
  $('lost').hidden = true;
  document.body.classList.remove('stale');
  if (instance !== m.instance) { // another one, or begun anew: its past is not this one's
    instance = m.instance;
    samples = [];
    forgetDecisions();
  }
  const since = samples.at(-1)?.t ?? 0;
  samples = [...samples, ...m.samples.filter((s) => s.t > since)].slice(-KEPT);
  text($('frontend'), m.frontend + (m.draining ? ', draining' : ''));
  banner(m);
  plots.draw(samples, m.interval_seconds);
  const blocks = showWorkers(m);
  showDecisions(m.decisions);
  offerModels(m.workers);
  tiles(m, blocks);
}

function banner(m) {
  const x = m.index;
  $('banner').dataset.state = x.state;
  text($('state'), x.state);
  text($('meaning'), `${MEANING[x.state] ?? ''}${x.reason && x.state !== 'bypassed' ? ` (${x.reason})` : ''}`);
  const parts = [];
  if (x.since) parts.push(`since ${clock(x.since)}, ${span((Date.parse(m.time) - Date.parse(x.since)) / 1000)}`);
  if (x.state === 'exact') parts.push(`policy ${m.policy}`);
  else parts.push(`policy ${m.policy === 'kv' ? m.fallback : m.policy}`);
  if (x.last_updated) parts.push(`newest event or renewal ${span((Date.parse(m.time) - Date.parse(x.last_updated)) / 1000)} ago`);
  text($('detail'), parts.join(' · '));
  const down = x.links.filter((l) => !l.up && l.detail);
  const shown = down.map((l) => `${l.name}: ${l.detail}${l.since ? `, since ${clock(l.since)}` : ''}`);
  if ($('links').dataset.shown !== shown.join('\n')) {
    $('links').dataset.shown = shown.join('\n');
    $('links').replaceChildren(...shown.map((s) => el('li', {}, s)));
  }
  const title = `${x.state} · warmroute`;
  if (document.title !== title) document.title = title;
}

function tiles(m, blocks) {
  const recent = samples.slice(-10);
  const total = (f) => recent.reduce((n, s) => n + f(s), 0);
  const seconds = recent.length * m.interval_seconds || 1;
  text($('tile-rate'), `${(total((s) => s.states.reduce((a, b) => a + b, 0)) / seconds).toFixed(1)} /s`);
  text($('tile-flight'), count(m.in_flight));
  const asked = total((s) => s.prompt_blocks);
  text($('tile-hit'), asked ? percent(total((s) => s.hit_blocks) / asked) : '–');
  text($('tile-index'), micros(Math.max(0, ...recent.map((s) => s.index_p99_us))));
  const ready = m.workers.filter((w) => w.state === 'healthy').length;
  text($('tile-workers'), `${ready} of ${m.workers.length}`);
  text($('tile-blocks'), m.index.read ? count(blocks) : '–');
}

function lost(why) {
  document.body.classList.add('stale');
  $('lost').hidden = false;
  text($('lost'), `No news from the frontend: ${why}. What is shown is old. Trying again …`);
}

follow(show, lost);
