// Vercel's AI SDK, by both providers that speak to such servers: prints what its user gets, as JSON.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, jsonSchema, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const name = process.env.MODEL;
const at = { baseURL: process.env.BASE, apiKey: process.env.KEY };
const compatible = createOpenAICompatible({ name: "blinkpy", supportsStructuredOutputs: true, includeUsage: true, ...at });
const openai = createOpenAI(at);
const Weather = z.object({ city: z.enum(["Rome", "Oslo"]), degrees: z.number().int().min(-50).max(50), sunny: z.boolean() });
const prompt = process.env.TEXT;
const found = {};
for (const [kind, model] of [["compatible", compatible(name)], ["chat", openai.chat(name)], ["responses", openai.responses(name)]]) {
  const plain = { model, prompt, maxOutputTokens: 16, temperature: 0, maxRetries: 0 };
  const free = { model, prompt, temperature: 1, maxRetries: 0 };
  const one = (found[kind] = {});
  const answer = await generateText(plain);
  [one.text, one.tokens] = [answer.text, answer.usage.outputTokens];
  // A second turn: unless `store` is false, the provider of responses refers to answers that it takes for stored.
  const again = { ...plain, providerOptions: { openai: { store: false } } };
  const first = await generateText(again);
  const turns = [{ role: "user", content: prompt }, ...first.response.messages, { role: "user", content: "And then?" }];
  one.input_tokens = [first, await generateText({ ...again, prompt: undefined, messages: turns })].map((turn) => turn.usage.inputTokens);
  const stream = streamText(plain);
  one.streamed = "";
  for await (const part of stream.textStream) one.streamed += part;
  one.streamed_tokens = (await stream.usage).outputTokens;
  one.object = Weather.parse((await generateObject({ ...free, schema: Weather })).object);
  const objects = streamObject({ ...free, schema: Weather });
  one.partial = 0;
  for await (const part of objects.partialObjectStream) one.partial += 1;
  one.streamed_object = Weather.parse(await objects.object);
  const report = tool({ description: "Report the weather", inputSchema: Weather, execute: async ({ city }) => `Thanks for ${city}` });
  const called = await generateText({ ...free, tools: { report }, toolChoice: "required" });
  one.call = Weather.parse(called.toolCalls[0].input);
  one.result = [called.toolResults[0].output, `Thanks for ${one.call.city}`];
  // Two steps: the call that is forced, then an answer that knows its result.
  const steps = streamText({
    ...free, maxOutputTokens: 300, tools: { report }, stopWhen: stepCountIs(2),
    prepareStep: ({ stepNumber }) => (stepNumber === 0 ? { toolChoice: { type: "tool", toolName: "report" } } : { toolChoice: "none" }),
  });
  one.parts = [];
  for await (const part of steps.fullStream) {
    if (part.type === "error") throw part.error;
    if (one.parts.at(-1) !== part.type) one.parts.push(part.type);
  }
  one.steps = (await steps.steps).length;
}
console.log(JSON.stringify(found));
