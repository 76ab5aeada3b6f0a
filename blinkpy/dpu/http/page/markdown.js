// Markdown as a tree of blocks, and its elements. All text becomes text nodes: nothing that a model writes is read as HTML, images
// are links, and links have a scheme of SCHEMES. Time is linear in the text: each search has a limit.
const Markdown = (() => {
  const SCHEMES = ["http:", "https:", "mailto:"], DEEPEST = 8, LONGEST = 20000, TRIES = 32;
  const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/, HEADING = /^ {0,3}(#{1,6})(?: |$)/, RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
  const QUOTE = /^ {0,3}> ?/, ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( {1,4}|$)/, BAR = /^[ :|-]*-[ :|-]*$/;
  const SPECIAL = /[\\`*_~[!<]|https?:\/\//g;
  const LINK = /!?\[([^[\]]{0,500})\]\( {0,3}([^\s<>()]{1,2000}(?:\([^\s<>()]{0,500}\)[^\s<>()]{0,500})?)(?: {1,3}"[^"]{0,300}")? {0,3}\)/y;
  const BARE = /https?:\/\/[^\s<>"'`]{1,2000}/y, PAIRS = { "**": "strong", "__": "strong", "~~": "del", "*": "em", "_": "em" };

  // ---- blocks: {kind, source, ...}; source: the lines that made it

  function cells(line) {
    const found = [];
    let cell = "", code = false;
    for (let i = 0; i < line.length; i++) {
      if (line[i] === "\\" && line[i + 1] === "|") { cell += "|"; i++; continue; }
      if (line[i] === "`") code = !code;
      if (line[i] === "|" && !code) { found.push(cell.trim()); cell = ""; } else cell += line[i];
    }
    found.push(cell.trim());
    if (found[0] === "") found.shift();
    if (found.length && found[found.length - 1] === "") found.pop();
    return found;
  }

  const begins = line => FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
  const isTable = (lines, i) => lines[i].includes("|") && i + 1 < lines.length && lines[i + 1].includes("|") && BAR.test(lines[i + 1])
    && cells(lines[i]).length === cells(lines[i + 1]).length;

  function code(lines, i) {
    const [, fence, info] = FENCE.exec(lines[i]), text = [];
    const indent = lines[i].search(/[`~]/), closing = line => {
      const found = FENCE.exec(line);
      return found && found[1][0] === fence[0] && found[1].length >= fence.length && !found[2].trim();
    };
    let at = i + 1;
    for (; at < lines.length && !closing(lines[at]); at++) {
      const spaces = lines[at].search(/[^ ]|$/);
      text.push(lines[at].slice(Math.min(indent, spaces)));
    }
    return [{ kind: "code", language: info.trim().split(/\s/)[0].slice(0, 40), text: text.join("\n") }, Math.min(at + 1, lines.length)];
  }

  function list(lines, i, depth) {
    const ordered = /\d/.test(ITEM.exec(lines[i])[2]), items = [];
    const start = ordered ? parseInt(ITEM.exec(lines[i])[2], 10) : 0;
    let at = i;
    while (at < lines.length) {
      const found = RULE.test(lines[at]) ? null : ITEM.exec(lines[at]);
      if (!found || /\d/.test(found[2]) !== ordered) break;
      const indent = found[0].length + (found[3] ? 0 : 1), own = [lines[at].slice(found[0].length)];
      for (at++; at < lines.length; at++) {
        const line = lines[at], spaces = line.search(/[^ ]|$/);
        if (!line.trim()) {
          const next = lines[at + 1];
          if (next === undefined || (next.search(/[^ ]|$/) < indent && !ITEM.test(next))) break;
          own.push("");
        } else if (spaces >= indent) own.push(line.slice(indent));
        else if (spaces >= 2 && ITEM.test(line.trimStart())) own.push(line.trimStart());  // nested by fewer spaces, as models often write
        else if (begins(line) || !own[own.length - 1].trim()) break;
        else own.push(line);
      }
      items.push(blocks(own, depth + 1));
    }
    return [{ kind: "list", ordered, start, items }, at];
  }

  function blocks(lines, depth = 0) {
    if (depth > DEEPEST) return [{ kind: "paragraph", text: lines.join("\n"), source: "" }];
    const found = [];
    for (let i = 0; i < lines.length;) {
      const line = lines[i], from = i;
      let block;
      if (!line.trim()) { i++; continue; }
      if (FENCE.test(line)) [block, i] = code(lines, i);
      else if (HEADING.test(line)) {
        let text = line.trim();
        const level = text.search(/[^#]|$/);
        text = text.slice(level).trim();
        let end = text.length;
        while (end && text[end - 1] === "#") end--;
        if (!end || text[end - 1] === " ") text = text.slice(0, end).trim();
        block = { kind: "heading", level, text };
        i++;
      } else if (RULE.test(line)) { block = { kind: "rule" }; i++; }
      else if (QUOTE.test(line)) {
        const inner = [];
        for (; i < lines.length && lines[i].trim() && (QUOTE.test(lines[i]) || !begins(lines[i])); i++) inner.push(lines[i].replace(QUOTE, ""));
        block = { kind: "quote", blocks: blocks(inner, depth + 1) };
      } else if (ITEM.test(line)) [block, i] = list(lines, i, depth);
      else if (isTable(lines, i)) {
        const rows = [cells(line)];
        for (i += 2; i < lines.length && lines[i].includes("|"); i++) rows.push(cells(lines[i]).slice(0, rows[0].length));
        block = { kind: "table", rows };
      } else {
        const text = [line];
        for (i++; i < lines.length && lines[i].trim() && !begins(lines[i]) && !isTable(lines, i); i++) text.push(lines[i]);
        block = { kind: "paragraph", text: text.join("\n") };
      }
      found.push({ ...block, source: lines.slice(from, i).join("\n") });
    }
    return found;
  }

  // ---- inline: strings, and {kind, children or text, href}

  function safe(address) {
    try {
      const url = new URL(address);
      return SCHEMES.includes(url.protocol) ? url.href : null;
    } catch { return null; }
  }

  function closing(text, mark, from) {
    for (let at = from, tries = 0; tries < TRIES; tries++) {
      at = text.indexOf(mark, at);
      if (at < 0) return -1;
      if (mark.length === 2 && text[at + 2] === mark[0] && text[at + 3] !== mark[0]) at++;  // of three, the last two
      const before = text[at - 1], after = text[at + mark.length] || "";
      const longer = mark.length === 1 && (after === mark || before === mark);  // a part of a double mark
      if (at > from && !/\s|\\/.test(before) && !longer && (mark[0] !== "_" || !/\w/.test(after))) return at;
      at += longer ? 2 : mark.length;
    }
    return -1;
  }

  function runOf(text, ticks, from) {
    const runs = /`+/g;
    runs.lastIndex = from;
    for (let run = runs.exec(text); run; run = runs.exec(text)) if (run[0] === ticks) return run.index;
    return -1;
  }

  function inline(text, depth = 0) {
    if (depth > DEEPEST || text.length > LONGEST) return [text];
    const found = [], missing = new Set();
    let plain = "", at = 0;
    const push = node => { if (plain) found.push(plain); plain = ""; found.push(node); };
    while (at < text.length) {
      SPECIAL.lastIndex = at;
      const next = SPECIAL.exec(text);
      if (!next) break;
      plain += text.slice(at, next.index);
      at = next.index;
      const here = text[at], mark = text.slice(at, at + 2) in PAIRS ? text.slice(at, at + 2) : here;
      if (here === "\\") {
        if (/[!-/:-@[-`{-~]/.test(text[at + 1] || "")) at++;
        plain += text[at++];
      } else if (here === "`") {
        const run = /`+/y;
        run.lastIndex = at;
        const [ticks] = run.exec(text), end = missing.has(ticks) ? -1 : runOf(text, ticks, at + ticks.length);
        if (end < 0) { missing.add(ticks); plain += ticks; at += ticks.length; continue; }
        const inner = text.slice(at + ticks.length, end);
        push({ kind: "code", text: /^ .*[^ ].* $/s.test(inner) ? inner.slice(1, -1) : inner });
        at = end + ticks.length;
      } else if (here === "[" || here === "!") {
        LINK.lastIndex = at;
        const link = LINK.exec(text), href = link && safe(link[2]);
        if (!href) { plain += here; at++; continue; }
        push({ kind: "link", href, children: inline(link[1] || link[2], depth + 1) });
        at += link[0].length;
      } else if (here === "h" || here === "<") {
        BARE.lastIndex = here === "<" ? at + 1 : at;
        const bare = BARE.exec(text);
        if (!bare) { plain += here; at++; continue; }
        let address = bare[0];
        while (/[.,:;!?*_~]$/.test(address) || (address.endsWith(")") && !address.includes("("))) address = address.slice(0, -1);
        const href = safe(address);
        if (!href) { plain += here; at++; continue; }
        push({ kind: "link", href, children: [address] });
        at = BARE.lastIndex - (bare[0].length - address.length);
        if (here === "<" && text[at] === ">") at++;
      } else {
        const begin = at + mark.length, word = mark[0] === "_" && /\w/.test(text[at - 1] || "");
        const opens = mark in PAIRS && !word && begin < text.length && !/\s/.test(text[begin]) && !missing.has(mark);
        const end = opens ? closing(text, mark, begin) : -1;
        if (end < 0) { if (opens) missing.add(mark); plain += mark; at = begin; continue; }
        push({ kind: PAIRS[mark], children: inline(text.slice(begin, end), depth + 1) });
        at = end + mark.length;
      }
    }
    plain += text.slice(at);
    if (plain) found.push(plain);
    return found;
  }

  // ---- elements

  function add(parent, tag, className = "", text = "") {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text) element.textContent = text;
    parent.append(element);
    return element;
  }

  function addInline(parent, nodes) {
    for (const node of nodes) {
      if (typeof node === "string") {
        node.split("\n").forEach((line, i) => { if (i) add(parent, "br"); parent.append(line); });
        continue;
      }
      const element = add(parent, node.kind === "link" ? "a" : node.kind, "", node.text);
      if (node.kind === "link") { element.href = node.href; element.target = "_blank"; element.rel = "noopener noreferrer nofollow"; }
      addInline(element, node.children || []);
    }
  }

  function addBlock(parent, block) {
    if (block.kind === "code") {
      const figure = add(parent, "div", "code"), head = add(figure, "div", "codehead");
      add(head, "span", "", block.language || "text");
      const copy = add(head, "button", "quiet", "Copy");
      copy.type = "button";
      copy.setAttribute("aria-label", "Copy code");
      copy.addEventListener("click", () => copyText(block.text, copy));
      add(add(figure, "pre"), "code", "", block.text).tabIndex = 0;
    } else if (block.kind === "heading") addInline(add(parent, `h${Math.min(6, block.level + 2)}`), inline(block.text));
    else if (block.kind === "rule") add(parent, "hr");
    else if (block.kind === "quote") block.blocks.forEach(addBlock.bind(null, add(parent, "blockquote")));
    else if (block.kind === "list") {
      const element = add(parent, block.ordered ? "ol" : "ul");
      if (block.ordered) element.start = block.start;
      for (const item of block.items) {
        const entry = add(element, "li");
        item.forEach((one, i) => (one.kind === "paragraph" && i === 0 ? addInline(entry, inline(one.text)) : addBlock(entry, one)));
      }
    } else if (block.kind === "table") {
      const table = add(add(parent, "div", "wide"), "table");
      block.rows.forEach((row, i) => {
        const line = add(table, "tr");
        row.forEach(cell => addInline(add(line, i ? "td" : "th"), inline(cell)));
      });
    } else addInline(add(parent, "p"), inline(block.text));
  }

  // Show a text in an element. A block that has not changed since the last call keeps its elements.
  const shown = new WeakMap();
  function show(parent, text) {
    const before = shown.get(parent) || [], found = blocks(text.replace(/\r\n?/g, "\n").split("\n"));
    let same = 0;
    while (same < before.length && same < found.length && before[same] === found[same].source) same++;
    while (parent.children.length > same) parent.lastChild.remove();
    found.slice(same).forEach(block => {
      const whole = add(parent, "div");
      addBlock(whole, block);
    });
    shown.set(parent, found.map(block => block.source));
  }

  return { blocks: text => blocks(text.split("\n")), inline, show };
})();
