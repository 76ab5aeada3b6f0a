// The official client for Node: prints what its user gets, as JSON.
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: process.env.BASE, apiKey: process.env.KEY, maxRetries: 0 });
const model = process.env.MODEL;
const messages = [{ role: "user", content: process.env.TEXT }];
const fields = { model, messages, max_tokens: 16, temperature: 0 };
const Weather = z.object({ city: z.enum(["Rome", "Oslo"]), degrees: z.number().int().min(-50).max(50), sunny: z.boolean() });
const found = {};

found.models = (await client.models.list()).data.map((one) => one.id);
found.chat = (await client.chat.completions.create(fields)).choices[0].message.content;
const stream = client.chat.completions.stream({ ...fields, stream_options: { include_usage: true } });
found.streamed = "";
for await (const chunk of stream) found.streamed += chunk.choices[0]?.delta?.content ?? "";
found.usage = (await stream.finalChatCompletion()).usage.completion_tokens;
found.completion = (await client.completions.create({ model, prompt: "Once", max_tokens: 5, temperature: 0 })).choices[0].text;
found.response = (await client.responses.create({ model, input: process.env.TEXT, max_output_tokens: 16, temperature: 0 })).output_text;

const free = { model, messages, temperature: 1, seed: 1 };
const parsed = await client.chat.completions.parse({ ...free, response_format: zodResponseFormat(Weather, "weather") });
found.parsed = Weather.parse(parsed.choices[0].message.parsed);
const tool = zodFunction({ name: "report", parameters: Weather });
const called = await client.chat.completions.parse({ ...free, tools: [tool], tool_choice: "required" });
found.call = Weather.parse(called.choices[0].message.tool_calls[0].function.parsed_arguments);
found.reason = called.choices[0].finish_reason;
const calls = client.chat.completions.stream({ ...free, tools: [tool], tool_choice: "required" });
found.deltas = "";
calls.on("tool_calls.function.arguments.delta", (event) => (found.deltas += event.arguments_delta));
found.streamed_call = (await calls.finalChatCompletion()).choices[0].message.tool_calls[0].function.arguments;

const text = await client.responses.parse({ model, input: "x", temperature: 1, text: { format: zodTextFormat(Weather, "weather") } });
found.response_parsed = Weather.parse(text.output_parsed);
const flat = { type: "function", name: "report", parameters: z.toJSONSchema(Weather), strict: true };
const events = client.responses.stream({ model, input: "x", temperature: 1, tools: [flat], tool_choice: "required" });
found.response_deltas = "";
events.on("response.function_call_arguments.delta", (event) => (found.response_deltas += event.delta));
found.response_call = (await events.finalResponse()).output[0].arguments;
try {
  await client.chat.completions.create({ ...fields, temperature: 500 });
} catch (error) {
  found.error = [error.constructor.name, error.status, error.param];
}
console.log(JSON.stringify(found));
