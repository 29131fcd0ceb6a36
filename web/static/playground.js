// The playground: one conversation, streamed from /v1/chat/completions with the visitor's own key.
"use strict";

const element = (id) => document.getElementById(id);
const form = element("playground");
const talk = element("talk");
const emptyTalk = talk.innerHTML;
const KEY = "ncompass-key"; // in sessionStorage: this tab only, gone when it closes

let messages = [];
let running = null; // the AbortController of the answer that streams now

element("key").value = sessionStorage.getItem(KEY) ?? "";

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (!running) ask(element("question").value);
});
element("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
element("stop").addEventListener("click", () => running?.abort());
element("clear").addEventListener("click", () => {
  running?.abort();
  messages = [];
  talk.innerHTML = emptyTalk;
  element("question").focus();
});

async function ask(question) {
  sessionStorage.setItem(KEY, element("key").value.trim());
  if (messages.length === 0) talk.replaceChildren();
  addTurn("You", question);
  const turn = addTurn("Model", "");
  const before = messages;
  const conversation = [...before, { role: "user", content: question }];
  element("question").value = "";
  setRunning(new AbortController());
  const answer = { text: "", thought: "", finish: null, usage: null, timing: null };
  try {
    await stream(conversation, answer, () => show(turn, answer), running.signal);
  } catch (error) {
    if (error.name !== "AbortError") {
      fail(turn, error.message);
      element("question").value ||= question;
    } else {
      answer.finish = "stopped";
    }
  }
  setRunning(null);
  tell("");
  show(turn, answer);
  if (answer.text && messages === before) {
    messages = [...conversation, { role: "assistant", content: answer.text }];
  }
}

async function stream(conversation, answer, onChange, signal) {
  const system = element("system").value.trim();
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    signal,
    headers: {
      "authorization": `Bearer ${element("key").value.trim()}`,
      "content-type": "application/json",
    },
    body: JSON.stringify({
      model: element("model").value,
      messages: system ? [{ role: "system", content: system }, ...conversation] : conversation,
      temperature: Number(element("temperature").value),
      max_tokens: Number(element("max-tokens").value),
      stream: true,
      stream_options: { include_usage: true },
    }),
  });
  if (!response.ok) throw new Error(await reason(response));
  for await (const line of lines(response.body)) {
    if (line.startsWith(": ")) tell(line.slice(2));
    if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
    const event = JSON.parse(line.slice(6));
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices[0];
    answer.text += choice?.delta.content ?? "";
    answer.thought += choice?.delta.reasoning_content ?? "";
    answer.finish = choice?.finish_reason ?? answer.finish;
    answer.usage = event.usage ?? answer.usage;
    answer.timing = event.timing ?? answer.timing;
    onChange();
  }
}

async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    yield* parts;
  }
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The API answered ${response.status}.`;
  }
}

// A comment of the stream: "queued position=12 eta_ms=340", "paused code=…", "started".
function tell(comment) {
  const [word, ...pairs] = comment.split(" ");
  const told = Object.fromEntries(pairs.map((pair) => pair.split("=")));
  let text = "";
  if (word === "queued") {
    text = `In the queue, place ${told.position}`;
    if (told.eta_ms) text += `, about ${(told.eta_ms / 1000).toFixed(1)} s`;
  } else if (word === "paused") {
    text = `Out of credit: the answer waits ${told.ends_in_s} s for a top-up.`;
  }
  element("wait").textContent = text;
  element("wait").hidden = !text;
}

function addTurn(who, text) {
  const turn = document.createElement("article");
  turn.className = who === "You" ? "turn own" : "turn";
  for (const [part, content] of [["who", who], ["thought", ""], ["said", text], ["facts", ""]]) {
    const line = document.createElement("div");
    line.className = `turn-${part}`;
    line.textContent = content;
    turn.append(line);
  }
  talk.append(turn);
  turn.scrollIntoView({ block: "end" });
  return turn;
}

function show(turn, answer) {
  turn.querySelector(".turn-thought").textContent = answer.thought;
  turn.querySelector(".turn-said").textContent = answer.text;
  turn.querySelector(".turn-facts").textContent = facts(answer).join(" · ");
}

function facts({ finish, usage, timing }) {
  const found = [];
  if (timing?.ttft_ms != null) found.push(`first token ${Math.round(timing.ttft_ms)} ms`);
  if (timing?.decode_tokens_per_s != null) found.push(`${timing.decode_tokens_per_s.toFixed(1)} tokens/s`);
  if (usage) {
    found.push(`${usage.prompt_tokens} + ${usage.completion_tokens} tokens`);
    found.push(`$${usage.cost}`, `$${usage.balance_remaining} left`);
  }
  if (finish && finish !== "stop") found.push(finish === "length" ? "cut at the limit" : finish);
  return found;
}

function fail(turn, message) {
  const line = document.createElement("p");
  line.className = "error";
  line.setAttribute("role", "alert");
  line.textContent = message;
  turn.append(line);
}

function setRunning(controller) {
  running = controller;
  element("send").disabled = controller !== null;
  element("stop").hidden = controller === null;
}
