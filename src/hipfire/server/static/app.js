// The page's controls: the list of conversations, the composer, settings, colours, and the token dialog.

import { ApiError, listModels } from "./api.js";
import { allChats, readSettings, reportTrouble, saveSettings, saveToken } from "./store.js";
import { Thread } from "./thread.js";
import { make } from "./view.js";

const $ = (id) => document.getElementById(id);
const narrow = matchMedia("(max-width: 760px)");
const settings = readSettings();
let following = true;

// --- the thread ---

const thread = new Thread({
  list: $("messages"),
  onChange: refresh,
  onGrow: (force) => {
    if (force) following = true;
    if (following) $("thread").scrollTop = $("thread").scrollHeight;
    showEndButton();
  },
  onUnauthorized: askToken,
});

function atEnd() {
  const { scrollTop, scrollHeight, clientHeight } = $("thread");
  return scrollHeight - scrollTop - clientHeight < 60;
}

function showEndButton() {
  $("to-end").hidden = following || atEnd();
}

$("thread").addEventListener("scroll", () => {
  following = atEnd();
  showEndButton();
});
$("to-end").addEventListener("click", () => thread.onGrow(true));

function refresh() {
  $("empty").hidden = thread.chat.messages.length > 0;
  $("stop").hidden = !thread.busy;
  $("send").hidden = thread.busy;
  $("send").disabled = !$("input").value.trim() || !settings.model;
  const status = thread.busy ? "The model is answering" : "";
  if ($("status").textContent !== status) $("status").textContent = status;
  const open = thread.chat.title;
  document.title = open ? `${open.slice(0, 40)} – hipfire` : "hipfire";
  listChats();
}

$("messages").addEventListener("click", async (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  if (button.classList.contains("retry")) await thread.retry(settings.model, settings);
  else if (button.classList.contains("copy")) {
    await copyText(button, button.closest("figure").querySelector("code").textContent);
  } else if (button.classList.contains("copy-answer")) {
    const index = [...$("messages").children].indexOf(button.closest("li"));
    await copyText(button, thread.chat.messages[index].content);
  }
});

async function copyText(button, text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // plain HTTP from another machine has no clipboard interface: the old way works there
    const area = make("textarea", "visually-hidden", text);
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

// --- the composer ---

const input = $("input");

function fitInput() {
  input.style.height = "auto";
  input.style.height = `${Math.min(input.scrollHeight, innerHeight * 0.4)}px`;
  $("send").disabled = !input.value.trim() || !settings.model;
}

$("composer").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = input.value;
  if (!text.trim() || thread.busy || !settings.model) return;
  input.value = "";
  fitInput();
  const asked = thread.ask(text, settings.model, settings);
  history.replaceState(null, "", `#${thread.chat.id}`);
  await asked;
});
input.addEventListener("input", fitInput);
input.addEventListener("keydown", (event) => {
  // Enter that ends a composition (Japanese, Chinese, ...) belongs to the input method
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!thread.busy) $("composer").requestSubmit();
});
$("stop").addEventListener("click", () => {
  thread.stop();
  input.focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || $("token-dialog").open) return;
  if (thread.busy) thread.stop();
  else if (!$("settings").hidden) showSettings(false);
  else showSidebar(false);
});

// --- conversations ---

function listChats() {
  $("chats").replaceChildren(...allChats().map((chat) => {
    const item = make("li", chat.id === thread.chat.id ? "open" : "");
    const open = make("a", "", chat.title || "Untitled");
    open.href = `#${chat.id}`;
    if (chat.id === thread.chat.id) open.setAttribute("aria-current", "page");
    const remove = make("button", "icon remove", "✕");
    remove.type = "button";
    remove.setAttribute("aria-label", `Delete ${chat.title}`);
    remove.addEventListener("click", () => confirmRemoval(remove, chat.id));
    item.append(open, remove);
    return item;
  }));
}

function confirmRemoval(button, id) {
  if (button.classList.contains("sure")) {
    if (id === thread.chat.id) history.replaceState(null, "", location.pathname);
    thread.remove(id);
    return;
  }
  button.classList.add("sure");
  button.textContent = "Delete";
  setTimeout(() => {
    button.classList.remove("sure");
    button.textContent = "✕";
  }, 3000);
}

function openFromAddress() {
  const id = location.hash.slice(1);
  if (id !== thread.chat.id) thread.open(id);
  showSidebar(false);
}

addEventListener("hashchange", openFromAddress);
$("new-chat").addEventListener("click", () => {
  history.pushState(null, "", location.pathname);
  thread.open("");
  showSidebar(false);
  input.focus();
});

function showSidebar(open) {
  document.body.classList.toggle("sidebar-open", open);
  $("shade").hidden = !open;
}

$("open-sidebar").addEventListener("click", () => showSidebar(true));
$("close-sidebar").addEventListener("click", () => showSidebar(false));
$("shade").addEventListener("click", () => {
  showSidebar(false);
  if (narrow.matches) showSettings(false);
});

// --- settings and colours ---

const form = $("settings-form");

function showSettings(open) {
  $("settings").hidden = !open;
  $("open-settings").setAttribute("aria-expanded", String(open));
  if (open) form.elements.system.focus();
  else $("open-settings").focus();
}

$("open-settings").addEventListener("click", () => showSettings($("settings").hidden));
$("close-settings").addEventListener("click", () => showSettings(false));
for (const field of form.elements) {
  if (field.name) field.value = settings[field.name] ?? "";
}
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("input", ({ target }) => {
  settings[target.name] = target.validity.valid ? target.value : "";
  target.toggleAttribute("aria-invalid", !target.validity.valid);
  saveSettings(settings);
});
form.addEventListener("reset", () => {
  for (const field of form.elements) delete settings[field.name];
  saveSettings(settings);
});

const THEMES = { auto: ["◐", "as the system"], light: ["☀", "light"], dark: ["☾", "dark"] };

function showTheme() {
  const theme = settings.theme in THEMES ? settings.theme : "auto";
  document.documentElement.dataset.theme = theme;
  const [sign, words] = THEMES[theme];
  $("theme").firstElementChild.textContent = sign;
  $("theme").setAttribute("aria-label", `Colours: ${words}`);
  $("theme").title = `Colours: ${words}`;
}

$("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  settings.theme = names[(names.indexOf(settings.theme ?? "auto") + 1) % names.length];
  saveSettings(settings);
  showTheme();
});

// --- models, token, notices ---

function notice(text) {
  $("notice").hidden = !text;
  $("notice").firstElementChild.textContent = text;
}

$("notice").lastElementChild.addEventListener("click", () => notice(""));
reportTrouble(notice);

async function loadModels() {
  try {
    showModels(await listModels());
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) askToken();
    else notice(`The list of models is not available: ${error.message}`);
  }
}

function showModels(names) {
  $("model").replaceChildren(...names.map((name) => new Option(name, name)));
  if (!names.includes(settings.model)) settings.model = names[0] ?? "";
  $("model").value = settings.model;
  $("model").disabled = names.length === 0;
  notice(names.length ? "" : "There is no model on this server yet. Install one with: hipfire pull MODEL");
  refresh();
}

$("model").addEventListener("change", () => {
  settings.model = $("model").value;
  saveSettings(settings);
});

function askToken() {
  if (!$("token-dialog").open) $("token-dialog").showModal();
}

$("cancel-token").addEventListener("click", () => $("token-dialog").close("cancel"));
$("token-dialog").addEventListener("close", async () => {
  if ($("token-dialog").returnValue === "ok") {
    saveToken($("token").value.trim());
    await loadModels();
  } else notice("Without its token this server answers nothing.");
  $("token").value = "";
});

showTheme();
thread.open(location.hash.slice(1));
await loadModels();
