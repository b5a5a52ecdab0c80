// One message on the page: its text, folded reasoning, error and figures.

import { markdown } from "./markdown.js";

export function make(name, className = "", text = "") {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}

const WAITING = "Waiting for the model";
const FINISHES = {
  length: "cut off at the longest allowed length",
  tool_calls: "ended with a tool call",
};

function duration(ms) {
  if (ms < 100) return `${Math.round(ms)} ms`;
  return ms < 9950 ? `${(ms / 1000).toFixed(1)} s` : `${Math.round(ms / 1000)} s`;
}

const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

export function figuresText({ usage, timings, finish, stopped }) {
  const parts = [];
  if (usage) parts.push(plural(usage.completion_tokens, "token"));
  if (timings?.decode_tok_s > 0) parts.push(`${timings.decode_tok_s.toFixed(1)} tokens/s`);
  if (timings?.ttft_ms > 0) parts.push(`first after ${duration(timings.ttft_ms)}`);
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    parts.push(`prompt ${usage.prompt_tokens.toLocaleString("en")}${cached ? ` (${cached.toLocaleString("en")} cached)` : ""}`);
  }
  if (stopped) parts.push("stopped");
  if (FINISHES[finish]) parts.push(FINISHES[finish]);
  return parts.join(" · ");
}

export function userMessage(message) {
  const item = make("li", "message user");
  item.append(make("div", "bubble", message.content));
  return item;
}

// The element of an answer, with `update(message, live)` to show the message as it now is, and `wait(words)` to
// say what it waits for.
export function answer() {
  const item = make("li", "message assistant");
  const fold = make("details", "reasoning");
  const summary = make("summary", "", "Reasoning");
  const thoughts = make("div", "prose");
  fold.append(summary, thoughts);
  const text = make("div", "prose text");
  const wait = make("p", "wait");
  const waited = make("span", "", WAITING);
  wait.append(make("span", "dots"), waited);
  const warnings = make("p", "warnings");
  const error = make("p", "error");
  const foot = make("div", "foot");
  const actions = make("span", "actions");
  const figures = make("span", "figures");
  const copy = make("button", "action copy-answer", "Copy");
  const retry = make("button", "action retry", "Try again");
  copy.type = "button";
  retry.type = "button";
  actions.append(copy, retry);
  foot.append(actions, figures);
  item.append(fold, wait, text, error, warnings, foot);
  let shown = { content: null, reasoning: null };

  function update(message, live) {
    const reasoning = message.reasoning ?? "";
    if (reasoning !== shown.reasoning) thoughts.replaceChildren(markdown(reasoning));
    if (message.content !== shown.content) text.replaceChildren(markdown(message.content));
    shown = { content: message.content, reasoning };
    fold.hidden = !reasoning;
    summary.textContent = live && !message.content ? "Reasoning …" : "Reasoning";
    wait.hidden = !live || Boolean(reasoning || message.content);
    error.hidden = !message.error;
    error.textContent = message.error ?? "";
    warnings.hidden = !message.warnings?.length;
    warnings.textContent = (message.warnings ?? []).join("\n");
    item.classList.toggle("live", live);
    figures.textContent = live ? "" : figuresText(message);
    actions.hidden = live;
    copy.hidden = !message.content;
  }

  return { item, update, wait: (words) => { waited.textContent = words || WAITING; } };
}
