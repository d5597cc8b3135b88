// Requests with the token, and the feed of events. Events come by fetch, because an EventSource cannot send a header.
import { $ } from './dom.js';

const KEPT = 'warmroute-token';
let token = sessionStorage.getItem(KEPT) || '';
let asking = null; // a promise while the dialog is open

// ask opens the dialog and waits for a token; why says what is wrong with the last one.
function ask(why) {
  asking ||= new Promise((given) => {
    $('ask-why').textContent = why || 'It is kept in this tab only, and sent with each request.';
    const dialog = $('ask');
    dialog.oncancel = (e) => e.preventDefault(); // there is nothing behind it
    $('ask-form').onsubmit = (e) => {
      e.preventDefault();
      token = $('token').value;
      sessionStorage.setItem(KEPT, token);
      $('token').value = '';
      dialog.close();
      asking = null;
      given();
    };
    dialog.showModal();
  });
  return asking;
}

// request is fetch with the token. It asks for one as long as the frontend wants another.
export async function request(path, options = {}) {
  for (;;) {
    const sent = token;
    const headers = { ...options.headers };
    if (sent) headers.Authorization = `Bearer ${sent}`;
    const answer = await fetch(path, { ...options, headers, cache: 'no-store', credentials: 'omit' });
    const ours = (answer.headers.get('WWW-Authenticate') || '').includes('realm="warmroute"'); // and not an engine's
    if (!ours) return answer;
    await answer.text(); // done with
    if (sent !== token) continue;
    if (answer.status === 403) await ask('That token is for something else: this page takes one for queries.');
    else await ask(sent && 'That token is not the right one.');
  }
}

export async function post(path, body) {
  const answer = await request(path, { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(body) });
  const said = await answer.json().catch(() => null);
  if (!answer.ok) throw new Error(said?.error?.message || `the frontend answers ${answer.status}`);
  return said;
}

// follow calls on with every message, and lost with a reason while there is no feed. A page that nobody sees has none.
export function follow(on, lost) {
  let failures = 0;
  const visible = () => new Promise((seen) => {
    if (!document.hidden) return seen();
    document.addEventListener('visibilitychange', () => seen(), { once: true });
  });
  const once = async () => {
    const stop = new AbortController();
    const hide = () => document.hidden && stop.abort();
    document.addEventListener('visibilitychange', hide);
    let patience;
    const alive = (seconds) => {
      clearTimeout(patience);
      patience = setTimeout(() => stop.abort(), seconds * 1000);
    };
    try {
      alive(15);
      const answer = await request('ui/events', { signal: stop.signal });
      if (!answer.ok) throw new Error((await answer.json().catch(() => null))?.error?.message || `the frontend answers ${answer.status}`);
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let rest = ''; ;) {
        const { value, done } = await reader.read();
        if (done) throw new Error('the frontend ended the feed');
        const events = (rest + value).split('\n\n');
        rest = events.pop();
        for (const event of events) {
          if (!event.startsWith('data: ')) continue;
          const message = JSON.parse(event.slice(6));
          alive(Math.max(10, 5 * message.interval_seconds));
          failures = 0;
          on(message);
        }
      }
    } finally {
      clearTimeout(patience);
      document.removeEventListener('visibilitychange', hide);
    }
  };
  (async () => {
    for (;;) {
      await visible();
      try {
        await once();
      } catch (e) {
        if (document.hidden) continue;
        lost(e.name === 'AbortError' ? 'it says nothing any more' : e.message);
        const pause = Math.min(10, 0.5 * 2 ** failures++) * (0.5 + Math.random());
        await new Promise((done) => setTimeout(done, pause * 1000));
      }
    }
  })();
}
