// The server's OpenAI-compatible API as the page uses it: the list of models and streamed chats.

import { readToken } from "./store.js";

export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

function headers(extra = {}) {
  const token = readToken();
  return token ? { ...extra, Authorization: `Bearer ${token}` } : extra;
}

async function open(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.");
  }
  if (response.ok) return response;
  let message = `The server answered with status ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // no JSON error: the status says it all
  }
  throw new ApiError(message, response.status);
}

export async function listModels() {
  const response = await open("/v1/models", { headers: headers() });
  return (await response.json()).data.map((model) => model.id);
}

// Returns which model is being loaded and how far it is, in words; "" if none is, or nobody knows.
export async function loadingText() {
  try {
    const { loading_model: model, loading_progress: progress } = await (await fetch("/health")).json();
    const share = progress?.[1] ? ` (${Math.floor((100 * progress[0]) / progress[1])} %)` : "";
    return model ? `Loading ${model}${share}` : "";
  } catch {
    return "";
  }
}

// Yields the data of each server-sent event; comments (keepalives) and other fields are skipped.
export async function* sseData(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let buffer = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      buffer += done ? decoder.decode() : decoder.decode(value, { stream: true });
      const lines = buffer.split("\n");
      buffer = done ? "" : lines.pop();
      for (let line of lines) {
        if (line.endsWith("\r")) line = line.slice(0, -1);
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Yields {reasoning}, {content}, {finish}, {timings}, {usage} and {warnings}. Throws ApiError for an error of
// the server, before or in the stream, and for a stream that ends before it is complete.
export async function* streamChat(body, signal) {
  const response = await open("/v1/chat/completions", {
    method: "POST",
    headers: headers({ "Content-Type": "application/json" }),
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const data of sseData(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message ?? "The server reported an error.");
    const choice = chunk.choices?.[0];
    if (choice?.delta?.reasoning_content) yield { reasoning: choice.delta.reasoning_content };
    if (choice?.delta?.content) yield { content: choice.delta.content };
    if (choice?.finish_reason) yield { finish: choice.finish_reason };
    if (chunk.timings) yield { timings: chunk.timings };
    if (chunk.usage) yield { usage: chunk.usage };
    if (chunk.hipfire?.config_warnings?.length) yield { warnings: chunk.hipfire.config_warnings };
  }
  throw new ApiError("The connection ended before the answer was complete.");
}
