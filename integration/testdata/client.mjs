// Uses a warmroute frontend through OpenAI's own client, as an application would, and prints what it
// saw as one JSON object. Usage: node client.mjs <base URL> <model>
import OpenAI, { NotFoundError } from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0 });
const messages = [{ role: "user", content: "Say something." }];
const seen = {};

seen.models = [];
for await (const m of client.models.list()) seen.models.push(m.id);

const chat = await client.chat.completions.create({ model, messages, max_tokens: 12 });
seen.chat = { text: chat.choices[0].message.content, finish: chat.choices[0].finish_reason, usage: chat.usage };

seen.chatStream = { text: "" };
const stream = await client.chat.completions.create({
  model, messages, max_tokens: 12, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  seen.chatStream.text += chunk.choices[0]?.delta?.content ?? "";
  seen.chatStream.finish ??= chunk.choices[0]?.finish_reason;
  seen.chatStream.usage ??= chunk.usage;
}

const completion = await client.completions.create({ model, prompt: "Once upon a time", max_tokens: 12 });
seen.completion = { text: completion.choices[0].text, finish: completion.choices[0].finish_reason };

seen.completionStream = { text: "" };
for await (const chunk of await client.completions.create({ model, prompt: "Once upon a time", max_tokens: 12, stream: true })) {
  seen.completionStream.text += chunk.choices[0].text;
  seen.completionStream.finish ??= chunk.choices[0].finish_reason;
}

const raw = await client.chat.completions.create({ model, messages, max_tokens: 1 }).asResponse();
seen.state = raw.headers.get("x-kv-index-state");
await raw.text();

try {
  await client.chat.completions.create({ model: "no-such-model", messages });
} catch (e) {
  seen.unknownModel = { notFound: e instanceof NotFoundError, status: e.status, message: e.message };
}

seen.aborted = 0;
const abort = new AbortController();
try {
  for await (const chunk of await client.chat.completions.create(
    { model, messages, max_tokens: 4000, stream: true }, { signal: abort.signal })) {
    if (chunk.choices[0]?.delta?.content) seen.aborted++;
    if (seen.aborted === 2) abort.abort();
  }
} catch (e) {
  seen.abortError = e.constructor.name;
}

console.log(JSON.stringify(seen));
