// The @anthropic-ai/sdk package: whole, streamed, tools, errors. Prints one JSON object.
import Anthropic from "@anthropic-ai/sdk";

const [baseURL, apiKey, model] = process.argv.slice(2);
const client = new Anthropic({ baseURL, apiKey });
const asked = { model, max_tokens: 200, messages: [{ role: "user", content: "Hi" }] };
const input_schema = { type: "object", properties: { city: { type: "string" } } };
const tools = [{ name: "get_weather", input_schema }];

const whole = await client.messages.create(asked);
const streamed = await client.messages.stream(asked).finalText();
const called = await client.messages.stream({ ...asked, tools }).finalMessage();
const counted = await client.messages.countTokens({ model, messages: asked.messages });
const error = await client.messages
  .create({ ...asked, model: "no/such" })
  .catch((failure) => ({ name: failure.constructor.name, status: failure.status }));
console.log(JSON.stringify({
  whole: whole.content[0].text,
  streamed,
  calls: called.content.filter((block) => block.type === "tool_use").map((block) => block.input.city),
  is_counted: counted.input_tokens === whole.usage.input_tokens,
  error,
}));
