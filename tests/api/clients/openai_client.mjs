// The openai package: whole, streamed, calls, responses, errors. Prints one JSON object.
import OpenAI from "openai";

const [baseURL, apiKey, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${baseURL}/v1`, apiKey });
const messages = [{ role: "user", content: "Hi" }];
const parameters = { type: "object", properties: { city: { type: "string" } } };
const tools = [{ type: "function", function: { name: "get_weather", parameters } }];

const whole = await client.chat.completions.create({ model, messages });
let streamed = "";
for await (const chunk of await client.chat.completions.create({ model, messages, stream: true }))
  streamed += chunk.choices[0]?.delta?.content ?? "";
const called = await client.chat.completions.stream({ model, messages, tools }).finalChatCompletion();
let responded = "";
for await (const event of await client.responses.create({ model, input: "Hi", stream: true }))
  if (event.type === "response.output_text.delta") responded += event.delta;
const error = await client.chat.completions
  .create({ model: "no/such", messages })
  .catch((failure) => ({ name: failure.constructor.name, code: failure.code }));
console.log(JSON.stringify({
  whole: whole.choices[0].message.content,
  streamed,
  calls: called.choices[0].message.tool_calls.map((call) => JSON.parse(call.function.arguments).city),
  responded,
  error,
}));
