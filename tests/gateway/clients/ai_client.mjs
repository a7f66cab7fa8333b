// Vercel's AI SDK against a gateway: URL and KEY are the arguments.

import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, key] = process.argv.slice(2);
const provider = createOpenAICompatible({
  name: "edgeshard",
  baseURL: `${url}/v1`,
  apiKey: key,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = provider("tales");
const asked = { model, prompt: "Tell me of a king", maxOutputTokens: 12, temperature: 0, maxRetries: 0 };

const whole = await generateText(asked);
assert.ok(whole.text);
assert.equal(whole.finishReason, "length");
assert.equal(whole.usage.outputTokens, 12);

const stream = streamText(asked);
let text = "";
for await (const part of stream.textStream) text += part;
assert.equal(text, whole.text);
assert.equal((await stream.usage).outputTokens, 12);

const lamp = z.strictObject({ color: z.enum(["red", "green"]), on: z.boolean() });
const formed = await generateText({ ...asked, maxOutputTokens: 60, output: Output.object({ schema: lamp }) });
lamp.parse(formed.output);

const called = [];
const setLamp = tool({
  description: "Sets the lamp",
  inputSchema: lamp,
  execute: async (input) => {
    called.push(input);
    return "done";
  },
});
const tools = { setLamp };
const talk = { ...asked, maxOutputTokens: 60, tools };
// It must call the tool first; then it goes on with what that gave.
const handy = await generateText({
  ...talk,
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "auto" }),
  stopWhen: stepCountIs(2),
});
assert.equal(handy.steps.length, 2);
assert.equal(handy.steps[0].finishReason, "tool-calls");
lamp.parse(called[0]);
assert.ok(handy.text);
const streamed = streamText({ ...talk, toolChoice: { type: "tool", toolName: "setLamp" } });
for await (const part of streamed.fullStream) assert.notEqual(part.type, "error");
lamp.parse((await streamed.toolCalls)[0].input);

// What it sends back of earlier steps: reasoning, a call, and what that gave.
const past = [
  { role: "user", content: "x" },
  {
    role: "assistant",
    content: [
      { type: "reasoning", text: "The lamp" },
      { type: "tool-call", toolCallId: "call1", toolName: "setLamp", input: { color: "red", on: true } },
    ],
  },
  {
    role: "tool",
    content: [
      { type: "tool-result", toolCallId: "call1", toolName: "setLamp", output: { type: "text", value: "done" } },
    ],
  },
];
const short = { model, maxOutputTokens: 6, topP: 0, stopSequences: ["</s>"], maxRetries: 0, tools };
assert.ok((await generateText({ ...short, messages: past })).text);

const long = await generateText({ ...asked, model: provider("handy"), maxOutputTokens: 100_000 });
assert.ok(long.finishReason === "stop" || long.usage.totalTokens === 256);

for (const [wrong, status, said] of [
  [{ model: provider("none") }, 404, /none/],
  [{ prompt: "king ".repeat(600) }, 400, /maximum context length is 512 tokens/],
]) {
  await assert.rejects(generateText({ ...asked, ...wrong }), (error) => {
    assert.ok(APICallError.isInstance(error));
    assert.equal(error.statusCode, status);
    return said.test(error.message);
  });
}
console.log("ok");
