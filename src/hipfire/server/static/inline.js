// Markdown inside a line: emphasis, code, links, line breaks. Adds text nodes and elements, never markup text.

const ESCAPED = /\\([!-/:-@[-`{-~])/y;
const CODE = /(`+)(?!`)/y;
const URL_TEXT = /https?:\/\/[^\s<>"'`]*[^\s<>"'`.,;:!?)\]}*_]/y;
const ANGLE = /<((?:https?:\/\/|mailto:)[^\s<>]+)>/y;
const LINK = /(!?)\[((?:[^[\]\\\n]|\\.){0,500})\]\(\s*<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+["'(][^"'\n]*["')])?\s*\)/y;
const MARKS = ["***", "___", "**", "__", "~~", "*", "_"];
const TAGS = { "***": ["strong", "em"], ___: ["strong", "em"], "**": ["strong"], __: ["strong"], "~~": ["del"], "*": ["em"], _: ["em"] };
const MAX_DEPTH = 6;
// above this a "paragraph" is no prose: searching it for pairs of marks would only cost time
const MAX_LENGTH = 20000;

export function inline(text, parent, depth = 0) {
  if (text.length > MAX_LENGTH || depth > MAX_DEPTH) {
    parent.append(text);
    return;
  }
  let plain = "";
  // marks that nothing closes from some place on: no later one needs to be searched for
  const unclosed = new Set();
  const flush = () => {
    if (plain) parent.append(plain);
    plain = "";
  };
  let at = 0;
  while (at < text.length) {
    const made = special(text, at, depth, unclosed);
    if (!made) {
      plain += text[at];
      at += 1;
    } else if (typeof made.node === "string") {
      plain += made.node;
      at = made.end;
    } else {
      if (made.node.nodeName === "BR") plain = plain.trimEnd();
      flush();
      parent.append(made.node);
      at = made.end;
    }
  }
  flush();
}

function match(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text);
}

// Returns {node, end} if something other than plain text starts at `at`.
function special(text, at, depth, unclosed) {
  switch (text[at]) {
    case "\\": return escaped(text, at);
    case "`": return code(text, at, unclosed);
    case "\n": return lineBreak(text, at);
    case "<": return angle(text, at);
    case "[": case "!": return link(text, at, depth);
    case "h": return bareUrl(text, at);
    case "*": case "_": case "~": return emphasis(text, at, depth, unclosed);
    default: return null;
  }
}

function escaped(text, at) {
  if (text[at + 1] === "\n") return { node: document.createElement("br"), end: at + 2 };
  const found = match(ESCAPED, text, at);
  return found && { node: found[1], end: at + 2 };
}

function code(text, at, unclosed) {
  const [ticks] = match(CODE, text, at);
  let end = unclosed.has(ticks) ? -1 : text.indexOf(ticks, at + ticks.length);
  while (end > 0 && text[end + ticks.length] === "`") {
    while (text[end] === "`") end += 1;
    end = text.indexOf(ticks, end);
  }
  if (end < 0) {
    unclosed.add(ticks);
    return { node: ticks, end: at + ticks.length };
  }
  const node = document.createElement("code");
  const inner = text.slice(at + ticks.length, end).replaceAll("\n", " ");
  node.textContent = /^ .*[^ ].* $/.test(inner) ? inner.slice(1, -1) : inner;
  return { node, end: end + ticks.length };
}

// Chat models mean their line breaks: a single one is kept.
function lineBreak(text, at) {
  return { node: document.createElement("br"), end: at + 1 };
}

function anchor(target) {
  let url;
  try {
    url = new URL(target);
  } catch {
    return null;
  }
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return null;
  const node = document.createElement("a");
  node.href = url.href;
  node.target = "_blank";
  node.rel = "noopener noreferrer";
  return node;
}

function angle(text, at) {
  const found = match(ANGLE, text, at);
  const node = found && anchor(found[1]);
  if (!node) return null;
  node.textContent = found[1];
  return { node, end: at + found[0].length };
}

function link(text, at, depth) {
  const found = match(LINK, text, at);
  const node = found && anchor(found[3]);
  if (!node) return null;
  if (found[1]) node.textContent = `picture: ${found[2] || found[3]}`;
  else inline(found[2] || found[3], node, depth + 1);
  // a link inside a link's text would be invalid: its text stays
  for (const nested of node.querySelectorAll("a")) nested.replaceWith(...nested.childNodes);
  return { node, end: at + found[0].length };
}

function bareUrl(text, at) {
  if (/[\w/]/.test(text[at - 1] ?? "")) return null;
  const found = match(URL_TEXT, text, at);
  const node = found && anchor(found[0]);
  if (!node) return null;
  node.textContent = found[0];
  return { node, end: at + found[0].length };
}

function emphasis(text, at, depth, unclosed) {
  const mark = MARKS.find((candidate) => text.startsWith(candidate, at));
  if (!mark) return null;
  const start = at + mark.length;
  const wordBefore = /\w/.test(text[at - 1] ?? "");
  const opens = start < text.length && !/\s/.test(text[start]) && text[start] !== mark[0]
    && !(mark[0] === "_" && wordBefore);
  if (!opens || unclosed.has(mark)) return { node: mark, end: start };
  const end = closing(text, start, mark);
  if (end < 0) {
    unclosed.add(mark);
    return { node: mark, end: start };
  }
  const [outer, second] = TAGS[mark];
  const node = document.createElement(outer);
  const target = second ? node.appendChild(document.createElement(second)) : node;
  inline(text.slice(start, end), target, depth + 1);
  return { node, end: end + mark.length };
}

// Returns where `mark` closes, -1 if it does not: after a non-space, not inside code, not part of a longer run.
function closing(text, start, mark) {
  for (let at = start; at < text.length; at += 1) {
    if (text[at] === "\\") at += 1;
    else if (text[at] === "`") at = Math.max(at, text.indexOf("`", at + 1));
    else if (text.startsWith(mark, at)) {
      let run = at;
      while (text[run] === mark[0]) run += 1;
      const exact = run - at === mark.length || (run - at === 3 && mark.length < 3);
      const word = mark[0] === "_" && /\w/.test(text[run] ?? "");
      if (exact && !/\s/.test(text[at - 1]) && !word && at > start) {
        // "**a *b***": the inner mark closes first
        return run - mark.length;
      }
      at = run - 1;
    }
  }
  return -1;
}
