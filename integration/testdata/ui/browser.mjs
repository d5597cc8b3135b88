// A browser that a test drives: one JSON array per line, [page, command, arguments…], and one answer per line, {"ok": value} or
// {"error": text}. The first argument of the program is the path of Chromium.
import readline from 'node:readline';
import { chromium } from 'playwright-core';

const browser = await chromium.launch({ executablePath: process.argv[2], args: ['--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage'] });
const patience = 30000;
const pages = new Map();

const commands = {
  // open shows a URL in a window of its own; options are those of a browser context, such as viewport and colorScheme.
  async open(name, url, options) {
    const context = await browser.newContext({ locale: 'en-GB', ...options });
    context.setDefaultTimeout(patience);
    const page = await context.newPage();
    const errors = [];
    page.on('console', (m) => ['error', 'warning'].includes(m.type()) && errors.push(m.text()));
    page.on('pageerror', (e) => errors.push(String(e)));
    page.on('requestfailed', (r) => errors.push(`${r.url()}: ${r.failure().errorText}`));
    page.on('request', (r) => { if (!r.url().startsWith(new URL(url).origin)) errors.push(`asked elsewhere: ${r.url()}`); });
    pages.set(name, { page, errors });
    await page.goto(url);
  },
  async close(name) {
    await pages.get(name).page.context().close();
    pages.delete(name);
  },
  // errors are the messages of the console so far, which are then forgotten.
  errors: async (name) => pages.get(name).errors.splice(0),
  // see waits until an element that says the text can be seen.
  see: (page, selector, text) => page.locator(selector).filter({ hasText: text }).first().waitFor(),
  gone: (page, selector) => page.locator(selector).first().waitFor({ state: 'hidden' }),
  text: (page, selector) => page.locator(selector).first().textContent(),
  texts: (page, selector) => page.locator(selector).allTextContents(),
  count: (page, selector) => page.locator(selector).count(),
  attribute: (page, selector, name) => page.locator(selector).first().getAttribute(name),
  fill: (page, selector, text) => page.locator(selector).fill(text),
  type: (page, text) => page.keyboard.insertText(text),
  press: (page, key) => page.keyboard.press(key),
  choose: (page, selector, value) => page.locator(selector).selectOption(value).then(() => null),
  focus: (page, selector) => page.locator(selector).focus(),
  click: (page, selector) => page.locator(selector).first().click(),
  // focused names the element that has the focus, by its id or else its name.
  focused: (page) => page.locator(':focus').first().evaluate((e) => e.id || e.localName),
  style: (page, selector, property) => page.locator(selector).first().evaluate((e, p) => getComputedStyle(e).getPropertyValue(p), property),
  // overflow is by how many pixels the page is wider than the window.
  overflow: (page) => page.locator('html').evaluate((e) => e.scrollWidth - e.clientWidth),
  screenshot: (page, path, options) => page.screenshot({ path, ...options }).then(() => null),
};

for await (const line of readline.createInterface({ input: process.stdin })) {
  let answer;
  try {
    const [name, command, ...args] = JSON.parse(line);
    const own = ['open', 'close', 'errors'].includes(command);
    answer = { ok: (await commands[command](own ? name : pages.get(name).page, ...args)) ?? null };
  } catch (e) {
    answer = { error: String(e) };
  }
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}
await browser.close();
