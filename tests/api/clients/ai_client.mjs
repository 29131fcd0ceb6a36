// Vercel's AI SDK, which checks each chunk against a schema of its own. Prints one JSON object.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, streamText, tool } from "ai";

const [baseURL, apiKey, name] = process.argv.slice(2);
const model = createOpenAICompatible({ name: "ncompass", baseURL: `${baseURL}/v1`, apiKey })(name);
const inputSchema = jsonSchema({ type: "object", properties: { city: { type: "string" } } });
const tools = { get_weather: tool({ description: "Weather", inputSchema }) };

const whole = await generateText({ model, prompt: "Hi" });
const streamed = await streamText({ model, prompt: "Hi" }).text;
const called = streamText({ model, prompt: "Hi", tools });
const calls = (await called.toolCalls).map((call) => call.input.city);
const error = await generateText({ model, prompt: "Hi", temperature: 9 })
  .catch((failure) => ({ status: failure.statusCode }));
console.log(JSON.stringify({ whole: whole.text, streamed, calls, error }));
