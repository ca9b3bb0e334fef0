"use strict";
/* The script of all pages. Without it they are whole; with it they can be filtered, sorted and
   saved as pictures, and a live page shows what changes. */
(() => {
  const find = (selector, root = document) => [...root.querySelectorAll(selector)];
  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };

  /* Live pages: the server sends the parts that have changed, as HTML of the same templates. */
  const parse = html => {
    const template = make("template");
    template.innerHTML = html;
    return template.content.firstElementChild;
  };
  const swap = (old, html) => {
    const part = parse(html);
    if (!old) return part;
    const open = find("details", old).map(details => details.open);
    find("details", part).forEach((details, k) => { details.open = Boolean(open[k]); });
    const focused = find("a, button, input, select, summary", old).indexOf(document.activeElement);
    old.replaceWith(part);
    enhance(part);
    if (focused >= 0) find("a, button, input, select, summary", part)[focused]?.focus({ preventScroll: true });
    return part;
  };
  const follow = address => {
    const source = new EventSource(address);
    const main = document.querySelector("main");
    source.addEventListener("parts", event => {
      const { title, order, changed } = JSON.parse(event.data);
      document.title = `${title} – ${document.title.split(" – ").pop()}`;
      let before = null;
      for (const name of order) {
        const old = document.getElementById(name);
        const part = name in changed ? swap(old, changed[name]) : old;
        if (!old) {
          before ? before.after(part) : main.prepend(part);
          enhance(part);
        }
        if (name !== "top") before = part;
      }
      for (const part of find("main > section")) if (!order.includes(part.id)) part.remove();
      document.body.dataset.updates = Number(document.body.dataset.updates || 0) + 1;
      document.body.removeAttribute("data-lost");
    });
    source.addEventListener("gone", () => { source.close(); document.body.dataset.lost = "The run was deleted."; });
    source.addEventListener("error", () => { document.body.dataset.lost = "No connection to dispfl view; this page may be out of date."; });
  };

  const enhance = root => {};

  enhance(document);
  if (document.body.dataset.events) follow(document.body.dataset.events);
})();
