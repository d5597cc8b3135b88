// Time plots of the samples that the page has: lines or stacked areas, with a cursor for mouse, touch and arrow keys.
import { el, key, micros, percent, svg, text } from './dom.js';

const LEAST = 60; // samples across, and more as they come
const H = 100;

// ratio over the last few samples: one alone has too few prompts.
function hitRatio(samples, i) {
  let hit = 0, blocks = 0;
  for (let j = Math.max(0, i - 9); j <= i; j++) {
    hit += samples[j].hit_blocks;
    blocks += samples[j].prompt_blocks;
  }
  return blocks > 0 ? hit / blocks : null;
}

const STATES = ['exact', 'partial', 'degraded', 'bypassed'];
const number = (x) => (x === null ? '–' : x.toFixed(x < 10 ? 1 : 0));

const PLOTS = [
  { id: 'hit', title: 'Hit ratio', max: 1, format: percent, series: [['a', 'of blocks, over 10 points', hitRatio]] },
  {
    id: 'index', title: 'Index time per request', format: micros,
    series: [['a', 'p50', (s, i) => s[i].index_p50_us || null], ['b', 'p99', (s, i) => s[i].index_p99_us || null]],
  },
  {
    id: 'states', title: 'Requests by index state', format: number, stacked: true, unit: '/s',
    series: STATES.map((name, n) => [name, name, (s, i) => s[i].states[n]]),
  },
  {
    id: 'spread', title: 'Load spread, in flight', format: number, least: 1,
    series: [['b', 'busiest', (s, i) => s[i].busiest], ['a', 'mean', (s, i) => s[i].mean]],
  },
];

// nice is a round number at or above x.
function nice(x) {
  const ten = 10 ** Math.floor(Math.log10(x || 1));
  return [1, 2, 5, 10].map((m) => m * ten).find((m) => m >= x * 0.999) ?? 10 * ten;
}

export class Plots {
  constructor(parent) {
    this.cursor = null; // samples from the newest
    this.samples = [];
    this.plots = PLOTS.map((p) => this.make(parent, p));
  }

  make(parent, p) {
    const out = el('output');
    const picture = svg('svg', { preserveAspectRatio: 'none', role: 'img', tabindex: 0, id: `plot-${p.id}` });
    const top = el('span'), first = el('span'), legend = el('div', { class: 'legend' });
    for (const [cls, label] of p.series) {
      legend.append(key(`f-${cls}`, label));
    }
    const line = svg('line', { class: 'cursor', y1: 0, y2: H, visibility: 'hidden' });
    parent.append(el('figure', {}, el('figcaption', {}, el('strong', {}, p.title), out),
      el('div', { class: 'plot' }, el('div', { class: 'y' }, top, el('span', {}, '0')), picture,
        el('div', { class: 'x' }, first, el('span', {}, 'now'))), legend));
    const paths = p.series.map(([cls]) => svg('path', { class: p.stacked ? `f-${cls}` : `line s-${cls}` }));
    picture.append(...paths, line);
    picture.addEventListener('pointermove', (e) => {
      const box = picture.getBoundingClientRect();
      this.point(Math.round((1 - (e.clientX - box.left) / box.width) * (this.across - 1)));
    });
    picture.addEventListener('pointerleave', () => this.point(null));
    picture.addEventListener('blur', () => this.point(null));
    picture.addEventListener('keydown', (e) => {
      const step = { ArrowLeft: 1, ArrowRight: -1, PageUp: 30, PageDown: -30 }[e.key];
      if (e.key === 'Escape') this.point(null);
      if (!step) return;
      e.preventDefault();
      this.point((this.cursor ?? (step > 0 ? -1 : 1)) + step);
    });
    return { ...p, out, picture, paths, line, top, first };
  }

  point(back) {
    this.cursor = back === null ? null : Math.max(0, Math.min(this.samples.length - 1, back));
    this.plots.forEach((p) => this.read(p));
  }

  // draw shows the samples; seconds is the time between two of them.
  draw(samples, seconds) {
    this.samples = samples;
    this.seconds = seconds;
    const W = this.across = Math.max(LEAST, samples.length);
    const ago = Math.round(W * seconds);
    for (const p of this.plots) {
      const columns = p.series.map(([, , value]) => samples.map((_, i) => {
        const v = value(samples, i);
        return v !== null && p.unit ? v / seconds : v;
      }));
      p.columns = columns;
      let most = 0;
      for (let i = 0; i < samples.length; i++) {
        const values = columns.map((c) => c[i] ?? 0);
        most = Math.max(most, p.stacked ? values.reduce((a, b) => a + b, 0) : Math.max(...values));
      }
      const max = p.max ?? Math.max(nice(most), p.least ?? 0);
      text(p.top, p.format(max) + (p.unit ?? ''));
      text(p.first, ago < 120 ? `−${ago} s` : `−${Math.round(ago / 60)} min`);
      p.picture.setAttribute('viewBox', `0 0 ${W} ${H}`);
      const x = (i) => W - samples.length + i + 0.5, y = (v) => (H - 1 - (v / (max || 1)) * (H - 3)).toFixed(1);
      if (p.stacked) this.stack(p, columns, x, y);
      else {
        p.paths.forEach((path, n) => {
          let d = '', pen = false;
          columns[n].forEach((v, i) => {
            if (v === null) { pen = false; return; }
            d += `${pen ? 'L' : 'M'}${x(i)} ${y(v)}${pen ? '' : 'h.01'}`;
            pen = true;
          });
          path.setAttribute('d', d);
        });
      }
      this.read(p);
    }
  }

  stack(p, columns, x, y) {
    const base = columns[0].map(() => 0);
    p.paths.forEach((path, n) => {
      let up = '', down = '';
      columns[n].forEach((v, i) => {
        const low = base[i];
        base[i] += v;
        up += `${i ? 'L' : 'M'}${x(i)} ${y(base[i])}`;
        down = `L${x(i)} ${y(low)}${down}`;
      });
      path.setAttribute('d', columns[n].some((v) => v > 0) ? `${up}${down}Z` : '');
    });
  }

  // read says the values at the cursor, or the newest.
  read(p) {
    if (!p.columns) return;
    const i = this.samples.length - 1 - (this.cursor ?? 0);
    const said = p.series.map(([, label], n) => {
      const v = p.columns[n][i] ?? null;
      return p.series.length === 1 ? p.format(v) : `${label} ${p.format(v)}`;
    });
    const shown = p.stacked ? said.filter((_, n) => p.columns[n][i] > 0) : said;
    const when = this.cursor ? ` ${Math.round(this.cursor * this.seconds)} s ago` : '';
    const line = (shown.join(', ') || '0') + (p.unit ?? '') + when;
    text(p.out, line);
    p.picture.setAttribute('aria-label', `${p.title}: ${line}`);
    p.line.setAttribute('visibility', this.cursor === null ? 'hidden' : 'visible');
    if (this.cursor !== null) {
      p.line.setAttribute('x1', this.across - 0.5 - this.cursor);
      p.line.setAttribute('x2', this.across - 0.5 - this.cursor);
    }
  }
}
