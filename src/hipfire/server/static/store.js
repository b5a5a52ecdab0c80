// Conversations and settings, kept in this browser's localStorage.
//
// Each conversation has a key of its own, so that two tabs never overwrite each other's. Where a browser
// refuses storage (private windows, a full quota) everything still works, in memory, until the tab closes.

const CHAT = "hipfire.chat.";
const SETTINGS = "hipfire.settings";
const TOKEN = "hipfire.token";
const memory = new Map();
let onTrouble = () => {};

export function reportTrouble(handler) {
  onTrouble = handler;
}

function put(key, value) {
  const text = JSON.stringify(value);
  memory.set(key, text);
  try {
    localStorage.setItem(key, text);
  } catch (error) {
    onTrouble(error.name === "QuotaExceededError"
      ? "This browser's storage is full. Delete old conversations to keep this one."
      : "This browser does not let the page keep conversations; they are lost when the tab closes.");
  }
}

function take(key) {
  let text = null;
  try {
    text = localStorage.getItem(key);
  } catch {
    // storage is switched off: what this tab wrote is in memory
  }
  try {
    return JSON.parse(text ?? memory.get(key) ?? "null");
  } catch {
    return null;
  }
}

function keys() {
  const found = new Set(memory.keys());
  try {
    for (let index = 0; index < localStorage.length; index += 1) found.add(localStorage.key(index));
  } catch {
    // as above
  }
  return [...found].filter((key) => key.startsWith(CHAT));
}

const isChat = (value) => value && typeof value.id === "string" && Array.isArray(value.messages);

export function newChat() {
  const id = Date.now().toString(36) + Math.random().toString(36).slice(2, 8);
  return { id, title: "", updated: Date.now(), messages: [] };
}

export function allChats() {
  return keys().map(take).filter(isChat).sort((a, b) => b.updated - a.updated);
}

export function readChat(id) {
  const chat = take(CHAT + id);
  return isChat(chat) ? chat : null;
}

export function saveChat(chat) {
  chat.updated = Date.now();
  put(CHAT + chat.id, chat);
}

export function deleteChat(id) {
  memory.delete(CHAT + id);
  try {
    localStorage.removeItem(CHAT + id);
  } catch {
    // it was in memory only
  }
}

export function readSettings() {
  const value = take(SETTINGS);
  return value && typeof value === "object" ? value : {};
}

export const saveSettings = (settings) => put(SETTINGS, settings);

// the token is a secret: it lives as long as the tab, and is not written to disk with the conversations
export function readToken() {
  try {
    return sessionStorage.getItem(TOKEN) ?? memory.get(TOKEN) ?? "";
  } catch {
    return memory.get(TOKEN) ?? "";
  }
}

export function saveToken(token) {
  memory.set(TOKEN, token);
  try {
    sessionStorage.setItem(TOKEN, token);
  } catch {
    // kept in memory
  }
}
