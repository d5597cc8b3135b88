// Small helpers: elements, numbers, times. Text only ever goes in as text.
const SVG = 'http://www.w3.org/2000/svg';

export const $ = (id) => document.getElementById(id);

export function el(name, attributes = {}, ...children) {
  const e = document.createElement(name);
  for (const [k, v] of Object.entries(attributes)) if (v !== undefined) e.setAttribute(k, v);
  e.append(...children);
  return e;
}

export function svg(name, attributes = {}, ...children) {
  const e = document.createElementNS(SVG, name);
  for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
  e.append(...children);
  return e;
}

// text sets what an element says, and leaves it alone where it says so already.
export function text(e, s) {
  if (e.textContent !== s) e.textContent = s;
}

export const percent = (x) => (x === null || x === undefined ? '–' : `${Math.round(x * 100)} %`);
export const plural = (n, what) => `${count(n)} ${what}${n === 1 ? '' : 's'}`;
export const count = (n) => n.toLocaleString('en');

export function micros(us) {
  if (!us) return '–';
  return us < 1000 ? `${Math.round(us)} µs` : `${(us / 1000).toFixed(us < 10000 ? 2 : 1)} ms`;
}

export function span(seconds) {
  if (seconds < 0.95) return `${Math.max(0, seconds).toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

export const clock = (t) => new Date(t).toLocaleTimeString('en-GB');

export const TIERS = ['device', 'host', 'disk', 'predicted'];

export function key(cls, label) {
  const box = svg('svg', { viewBox: '0 0 10 10', preserveAspectRatio: 'none', 'aria-hidden': 'true' }, svg('rect', { class: cls, width: 10, height: 10 }));
  return el('span', { class: 'key' }, box, label);
}

// bar draws runs of [class, length] side by side.
export function bar(runs, total, label, cls = '') {
  const b = svg('svg', { class: `bar ${cls}`, viewBox: `0 0 ${Math.max(total, 1)} 10`, preserveAspectRatio: 'none', role: 'img', 'aria-label': label });
  b.append(svg('title', {}, label), svg('rect', { class: 'f-empty', width: Math.max(total, 1), height: 10 }));
  let at = 0;
  for (const [name, n] of runs) {
    if (name && n > 0) b.append(svg('rect', { class: `f-${name}`, x: at, width: n, height: 10 }));
    at += n;
  }
  return b;
}
