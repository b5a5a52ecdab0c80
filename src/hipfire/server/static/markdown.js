// Markdown to DOM nodes. Text only ever becomes text nodes, so no reply can put markup or script into the page;
// links go to http, https and mailto only, and pictures are shown as links, so that no reply fetches anything.

import { inline } from "./inline.js";

const MAX_DEPTH = 8;
const FENCE = /^( {0,3})(`{3,}(?!.*`)|~{3,})(.*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:( {1,4})(?=\S)|[ \t]*$|[ \t]+)(.*)$/;
const TABLE_RULE = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;

export function markdown(text) {
  const root = document.createDocumentFragment();
  blocks(text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n"), root, 0);
  return root;
}

function add(parent, name, className = "") {
  const element = document.createElement(name);
  if (className) element.className = className;
  parent.append(element);
  return element;
}

function blocks(lines, parent, depth) {
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) at += 1;
    else at = block(lines, at, parent, depth);
  }
}

// Adds the block that starts at line `at`; returns the line after it.
function block(lines, at, parent, depth) {
  const line = lines[at];
  const fence = line.match(FENCE);
  if (fence) return fencedCode(lines, at, parent, fence);
  const heading = line.match(HEADING);
  if (heading) {
    inline(headingText(heading[2] ?? ""), add(parent, `h${heading[1].length}`));
    return at + 1;
  }
  if (RULE.test(line)) {
    add(parent, "hr");
    return at + 1;
  }
  if (depth < MAX_DEPTH && QUOTE.test(line)) return quote(lines, at, parent, depth);
  if (depth < MAX_DEPTH && ITEM.test(line)) return list(lines, at, parent, depth);
  if (isTable(lines, at)) return table(lines, at, parent);
  return paragraph(lines, at, parent, depth);
}

// "# Title ##" may be closed by marks of its own
function headingText(text) {
  const trimmed = text.trimEnd();
  let end = trimmed.length;
  while (trimmed[end - 1] === "#") end -= 1;
  return end === 0 || /\s/.test(trimmed[end - 1]) ? trimmed.slice(0, end).trimEnd() : trimmed;
}

function fencedCode(lines, at, parent, [, indent, mark, info]) {
  const close = new RegExp(`^ {0,3}\\${mark[0]}{${mark.length},}[ \\t]*$`);
  const strip = new RegExp(`^ {0,${indent.length}}`);
  const code = [];
  let next = at + 1;
  while (next < lines.length && !close.test(lines[next])) {
    code.push(lines[next].replace(strip, ""));
    next += 1;
  }
  codeBlock(parent, code.join("\n"), info.trim().split(/\s/, 1)[0]);
  return next + 1;
}

function codeBlock(parent, code, language) {
  const figure = add(parent, "figure", "code");
  const bar = add(figure, "figcaption");
  add(bar, "span").textContent = language || "code";
  const button = add(bar, "button", "copy");
  button.type = "button";
  button.textContent = "Copy";
  add(add(figure, "pre"), "code").textContent = code;
  figure.querySelector("pre").tabIndex = 0;
}

function quote(lines, at, parent, depth) {
  const inner = [];
  let next = at;
  while (next < lines.length && lines[next].trim() && (QUOTE.test(lines[next]) || !startsBlock(lines, next))) {
    inner.push(lines[next].replace(QUOTE, ""));
    next += 1;
  }
  blocks(inner, add(parent, "blockquote"), depth + 1);
  return next;
}

function list(lines, at, parent, depth) {
  const first = lines[at].match(ITEM);
  const ordered = /\d/.test(first[2]);
  const element = add(parent, ordered ? "ol" : "ul");
  if (ordered && parseInt(first[2], 10) !== 1) element.start = parseInt(first[2], 10);
  const base = first[1].length;
  let next = at;
  while (next < lines.length) {
    const item = lines[next].match(ITEM);
    if (!item || RULE.test(lines[next])) break;
    if (item[1].length > base + 1 || item[1].length < base || /\d/.test(item[2]) !== ordered) break;
    next = listItem(lines, next, element, item, depth);
  }
  return next === at ? paragraph(lines, at, parent, depth) : next;
}

function listItem(lines, at, parent, item, depth) {
  const column = item[1].length + item[2].length + (item[3]?.length ?? 1);
  const inner = [item[4]];
  let next = at + 1;
  while (next < lines.length) {
    const line = lines[next];
    const indent = line.length - line.trimStart().length;
    // "1. a" with its continuation or sub-list indented by two only is what models often write
    const inside = indent >= column || (indent > item[1].length + 1 && ITEM.test(line));
    if (!line.trim()) {
      if (!followsInside(lines, next, item[1].length + 1)) break;
      inner.push("");
    } else if (inside) inner.push(line.slice(Math.min(indent, column)));
    else if (lines[next - 1].trim() && !ITEM.test(line) && !startsBlock(lines, next)) inner.push(line.trimStart());
    else break;
    next += 1;
  }
  const element = add(parent, "li");
  blocks(inner, element, depth + 1);
  // a tight item reads better without the margins of a paragraph
  const only = element.firstElementChild;
  if (only?.tagName === "P" && !inner.includes("")) only.replaceWith(...only.childNodes);
  while (next < lines.length && !lines[next].trim() && ITEM.test(lines[next + 1] ?? "")) next += 1;
  return next;
}

// Whether the text after blank lines still belongs to the item whose marker is left of column `least`.
function followsInside(lines, at, least) {
  let next = at;
  while (next < lines.length && !lines[next].trim()) next += 1;
  if (next >= lines.length) return false;
  return lines[next].length - lines[next].trimStart().length > least;
}

function isTable(lines, at) {
  return lines[at].includes("|") && at + 1 < lines.length && lines[at + 1].includes("-")
    && TABLE_RULE.test(lines[at + 1]) && cells(lines[at]).length === cells(lines[at + 1]).length;
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function table(lines, at, parent) {
  const alignment = cells(lines[at + 1]).map((rule) =>
    (rule.endsWith(":") ? (rule.startsWith(":") ? "center" : "right") : ""));
  const element = add(add(parent, "div", "table"), "table");
  const row = (line, section, name) => {
    const made = add(section, "tr");
    const texts = cells(line);
    alignment.forEach((align, index) => inline(texts[index] ?? "", add(made, name, align)));
  };
  row(lines[at], add(element, "thead"), "th");
  const body = add(element, "tbody");
  let next = at + 2;
  while (next < lines.length && lines[next].trim() && !startsBlock(lines, next)) {
    row(lines[next], body, "td");
    next += 1;
  }
  return next;
}

function startsBlock(lines, at) {
  const line = lines[at];
  if (FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line)) return true;
  const item = line.match(ITEM);
  // a number in the middle of a paragraph ("in\n1984. ...") starts no list unless it is a 1
  return Boolean(item) && item[4] !== "" && (!/\d/.test(item[2]) || parseInt(item[2], 10) === 1);
}

function paragraph(lines, at, parent, depth) {
  const texts = [lines[at]];
  let next = at + 1;
  while (next < lines.length && lines[next].trim() && !(depth < MAX_DEPTH && startsBlock(lines, next))
    && !isTable(lines, next)) {
    texts.push(lines[next]);
    next += 1;
  }
  inline(texts.map((text) => text.trimStart()).join("\n"), add(parent, "p"));
  return next;
}
