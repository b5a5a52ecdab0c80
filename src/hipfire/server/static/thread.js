// The open conversation: sends it, streams the answer into it, keeps it, and shows it.

import { ApiError, loadingText, streamChat } from "./api.js";
import { deleteChat, newChat, readChat, saveChat } from "./store.js";
import { answer, userMessage } from "./view.js";

const says = (message) => message?.role === "assistant" && Boolean(message.content || message.reasoning);

// A question that got no answer (it failed, or was stopped at once) is not part of what the model is told:
// most chat templates want question and answer to take turns.
export function history(messages) {
  const told = messages.filter((message, index) => (message.role === "assistant"
    ? says(message)
    : index === messages.length - 1 || says(messages[index + 1])));
  return told.map(({ role, content, reasoning }) => (
    reasoning ? { role, content, reasoning_content: reasoning } : { role, content }));
}

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repeat_penalty", "seed", "max_tokens"];

// Only what the user chose is sent: everything else is the server's to decide.
export function requestBody(model, settings, messages) {
  const body = { model, messages: history(messages) };
  if (settings.system?.trim()) body.messages.unshift({ role: "system", content: settings.system });
  for (const name of NUMBERS) {
    const text = settings[name] ?? "";
    if (text !== "" && Number.isFinite(Number(text))) body[name] = Number(text);
  }
  if (settings.thinking) body.thinking = { type: settings.thinking };
  if (settings.reasoning_effort) body.reasoning_effort = settings.reasoning_effort;
  return body;
}

export class Thread {
  constructor({ list, onChange, onGrow, onUnauthorized }) {
    this.list = list;
    this.onChange = onChange;
    this.onGrow = onGrow;
    this.onUnauthorized = onUnauthorized;
    this.chat = newChat();
    this.running = null;
    // a page that is closed in the middle of an answer keeps what there is
    addEventListener("pagehide", () => {
      if (!this.busy) return;
      this.chat.messages.at(-1).stopped = true;
      saveChat(this.chat);
    });
  }

  get busy() {
    return this.running !== null;
  }

  open(id) {
    this.stop();
    this.chat = (id && readChat(id)) || newChat();
    this.render();
  }

  remove(id) {
    if (id === this.chat.id) {
      this.stop();
      this.chat = newChat();
      this.render();
    }
    deleteChat(id);
    this.onChange();
  }

  render() {
    this.list.replaceChildren(...this.chat.messages.map((message) => {
      if (message.role === "user") return userMessage(message);
      const { item, update } = answer();
      update(message, false);
      return item;
    }));
    this.onChange();
    this.onGrow(true);
  }

  stop() {
    this.running?.abort();
    this.running = null;
  }

  async ask(text, model, settings) {
    const { chat } = this;
    chat.messages.push({ role: "user", content: text });
    chat.title ||= text.trim().replace(/\s+/g, " ").slice(0, 80);
    saveChat(chat);
    this.list.append(userMessage(chat.messages.at(-1)));
    await this.reply(model, settings);
  }

  // Answers the last question again.
  async retry(model, settings) {
    if (this.busy || this.chat.messages.length < 2) return;
    this.chat.messages.pop();
    this.list.lastElementChild.remove();
    await this.reply(model, settings);
  }

  async reply(model, settings) {
    const { chat } = this;
    const abort = new AbortController();
    const message = { role: "assistant", content: "" };
    const body = requestBody(model, settings, chat.messages);
    chat.messages.push(message);
    const { item, update, wait } = answer();
    this.list.append(item);
    update(message, true);
    // a model that has to be loaded first lets its user wait long: it is told how far that is
    const watch = setInterval(async () => wait(await loadingText()), 500);
    this.running = abort;
    this.onChange();
    this.onGrow(true);
    const show = this.painter(() => update(message, true));
    try {
      for await (const event of streamChat(body, abort.signal)) {
        clearInterval(watch);
        take(message, event);
        show();
      }
    } catch (error) {
      explain(message, error, abort.signal.aborted);
      if (error instanceof ApiError && error.status === 401) this.onUnauthorized();
    }
    clearInterval(watch);
    show.cancel();
    update(message, false);
    // a conversation that was deleted while it was answered stays deleted
    if (this.chat === chat || readChat(chat.id)) saveChat(chat);
    if (this.running === abort) this.running = null;
    this.onChange();
    this.onGrow(false);
  }

  // Many pieces may arrive between two pictures of the screen: they are drawn together.
  painter(draw) {
    let frame = 0;
    const show = () => {
      frame ||= requestAnimationFrame(() => {
        frame = 0;
        draw();
        this.onGrow(false);
      });
    };
    show.cancel = () => cancelAnimationFrame(frame);
    return show;
  }
}

function take(message, event) {
  if (event.reasoning) message.reasoning = (message.reasoning ?? "") + event.reasoning;
  if (event.content) message.content += event.content;
  for (const name of ["finish", "timings", "usage", "warnings"]) {
    if (event[name]) message[name] = event[name];
  }
}

function explain(message, error, stopped) {
  if (stopped) message.stopped = true;
  else if (error instanceof ApiError) message.error = error.message;
  else if (error instanceof SyntaxError) message.error = "The server sent something that is not an answer.";
  else message.error = "The connection broke while the answer was on its way.";
}
