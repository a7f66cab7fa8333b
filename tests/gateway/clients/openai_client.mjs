// The openai library for Node against a gateway: URL and KEY are the arguments.

import assert from "node:assert/strict";
import { gzipSync } from "node:zlib";
import OpenAI, { APIError, NotFoundError } from "openai";

const [url, key] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1/`, apiKey: key, maxRetries: 0 });
const chat = [{ role: "user", content: "Tell me of a king" }];
const asked = { model: "tales", messages: chat, max_tokens: 12, temperature: 0 };

const models = [];
for await (const model of client.models.list()) models.push(model.id);
assert.ok(models.includes("tales") && models.includes("handy"));

const whole = await client.chat.completions.create(asked);
const text = whole.choices[0].message.content;
assert.ok(text);
assert.equal(whole.choices[0].finish_reason, "length");
const stream = await client.chat.completions.create({
  ...asked,
  stream: true,
  stream_options: { include_usage: true },
});
let streamed = "";
let usage = null;
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(streamed, text);
assert.deepEqual(usage, whole.usage);

const parameters = {
  type: "object",
  properties: { color: { enum: ["red", "green"] }, on: { type: "boolean" } },
  required: ["color", "on"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "set_lamp", parameters } }];
const handy = { model: "handy", messages: chat, tools };
const made = await client.chat.completions.create({ ...handy, max_tokens: 60, tool_choice: "required" });
const { message } = made.choices[0];
const [call] = message.tool_calls;
assert.deepEqual(Object.keys(JSON.parse(call.function.arguments)).sort(), ["color", "on"]);
const told = { role: "tool", tool_call_id: call.id, content: "done" };
const cut = { ...call, function: { ...call.function, arguments: '{"color": "re' } };
const others = { annotations: [], audio: null, reasoning: "easy", thinking: null };
for (const past of [message, { ...message, ...others }, { ...message, tool_calls: [cut] }]) {
  const again = await client.chat.completions.create({
    ...handy,
    messages: [...chat, past, told],
    max_tokens: 3,
    top_p: 0,
    stop: null,
    seed: null,
  });
  assert.ok(again.choices[0].message.content);
}
assert.equal(await client.chat.completions.stream(asked).finalContent(), text);

const responses = { model: "tales", input: "Tell me of a king", max_output_tokens: 12, temperature: 0 };
const response = await client.responses.create(responses);
assert.equal(response.output_text, text);
let deltas = "";
for await (const event of await client.responses.create({ ...responses, stream: true })) {
  if (event.type === "response.output_text.delta") deltas += event.delta;
}
assert.equal(deltas, text);
const searching = client.responses.create({ ...responses, tools: [{ type: "web_search" }, { type: "local_shell" }] });
const { data, response: raw } = await searching.withResponse();
assert.equal(data.output_text, text);
assert.equal(raw.headers.get("x-ignored-tools"), "web_search, local_shell");

const forced = { ...asked, stop: ["</s>"], ignore_eos: true, logit_bias: { 2: 100 } };
assert.equal((await client.chat.completions.create(forced)).choices[0].finish_reason, "stop");

const endless = { model: "handy", messages: chat, ignore_eos: true };
for (const limit of [{ max_tokens: 100_000 }, { max_completion_tokens: 4096 }, {}]) {
  const answer = await client.chat.completions.create({ ...endless, ...limit });
  assert.equal(answer.choices[0].finish_reason, "length");
  assert.equal(answer.usage.total_tokens, 256);
}

await assert.rejects(client.models.retrieve("none"), (error) => {
  assert.ok(error instanceof NotFoundError && error instanceof APIError);
  return error.requestID.startsWith("req_") && error.message.includes("none");
});
await assert.rejects(
  new OpenAI({ baseURL: url, apiKey: key, maxRetries: 0 }).chat.completions.create(asked),
  /\/v1\/chat\/completions/,
);

const headers = { authorization: `Bearer ${key}`, "content-type": "application/json" };
const head = await fetch(`${url}/v1/models`, { method: "HEAD", headers });
assert.equal(head.status, 200);
assert.equal(await head.text(), "");
const packed = await fetch(`${url}/v1/chat/completions`, {
  method: "POST",
  headers: { ...headers, "content-encoding": "gzip" },
  body: gzipSync(JSON.stringify(asked)),
});
assert.equal((await packed.json()).choices[0].message.content, text);
assert.equal((await fetch(`${url}/v1/models/`, { headers: { "x-api-key": key }, redirect: "error" })).status, 200);
console.log("ok");
