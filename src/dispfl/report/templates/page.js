"use strict";
/* The script of all pages. Without it they are whole; with it rows can be chosen, peers sorted and
   pictures saved, and a live page shows what changes. */
(() => {
  const find = (selector, root = document) => [...root.querySelectorAll(selector)];
  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };
  const button = (text, label, onClick) => {
    const element = make("button", { type: "button", "aria-label": label }, text);
    element.addEventListener("click", onClick);
    return element;
  };

  /* Choices are kept in the address: #hide=Local&reference=Ditto&metric=f1&sort=name */
  const read = () => new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : "");
  const choices = read();
  const choose = change => {
    change(choices);
    history.replaceState(null, "", `#${choices}`);
    apply();
  };

  /* Pictures: a copy of a chart with its colours written out, as other programs need them. */
  const STYLES = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-linecap",
    "stroke-linejoin", "opacity", "font-size", "font-weight", "text-anchor"];
  const draw = (tag, attributes = {}, ...children) => {
    const element = document.createElementNS(document.querySelector("svg").namespaceURI, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };
  const copyWithColours = drawing => {
    const copy = drawing.cloneNode(true);
    const copies = [copy, ...find("*", copy)];
    [drawing, ...find("*", drawing)].forEach((element, k) => {
      const style = getComputedStyle(element);
      for (const name of STYLES) copies[k].setAttribute(name, style.getPropertyValue(name));
      copies[k].removeAttribute("class");
      copies[k].removeAttribute("style");
      if (style.display === "none") copies[k].setAttribute("display", "none");
    });
    for (const element of find("[display=none]", copy)) element.remove();
    return copy;
  };
  const MARGIN = 8; /* Dots at the edge are drawn as a whole. */
  const asPicture = (drawing, width, height) => {
    const size = { width: width + 2 * MARGIN, height: height + 2 * MARGIN };
    drawing.setAttribute("viewBox", `${-MARGIN} ${-MARGIN} ${size.width} ${size.height}`);
    drawing.setAttribute("width", size.width);
    drawing.setAttribute("height", size.height);
    drawing.setAttribute("font-family", "sans-serif");
    drawing.style.background = getComputedStyle(document.body).backgroundColor;
    return drawing;
  };
  const textIn = (element, x, y, anchor = "start") => {
    const { color } = getComputedStyle(element);
    return draw("text", { x, y, fill: color, "font-size": "12px", "text-anchor": anchor }, element.textContent.trim());
  };
  /* The page has the names of the colours above all charts of a section; a picture has its own. */
  const isShown = item => getComputedStyle(item).display !== "none";
  const legendOf = chart => {
    const items = find(".legend li", chart.closest("section"));
    const row = item => [...item.querySelector("path").classList].find(name => /^r\d+$/.test(name));
    return items.filter(item => isShown(item) && chart.querySelector(`.${row(item)}`));
  };
  const LEGEND_LINE = 20;
  const picture = chart => {
    const { width, height } = chart.viewBox.baseVal;
    const copy = copyWithColours(chart);
    const legend = legendOf(chart);
    if (legend.length < 2) return asPicture(copy, width, height);
    const ruler = make("canvas").getContext("2d");
    ruler.font = "12px sans-serif";
    let left = 0;
    let top = height + LEGEND_LINE / 2;
    for (const item of legend) {
      const length = 54 + ruler.measureText(item.textContent.trim()).width;
      if (left > 0 && left + length > width) {
        left = 0;
        top += LEGEND_LINE;
      }
      const swatch = copyWithColours(item.querySelector("path"));
      copy.append(draw("g", { transform: `translate(${left} ${top})` }, swatch, textIn(item, 34, 10)));
      left += length;
    }
    return asPicture(copy, width, top + LEGEND_LINE);
  };
  const CELL = { width: 150, height: 80, columns: 6 };
  const pictureOfPeers = list => {
    const peers = [...list.children];
    const drawing = draw("svg");
    peers.forEach((peer, k) => {
      const [name, value] = find("span", peer);
      const chart = copyWithColours(peer.querySelector("svg"));
      for (const [key, length] of Object.entries({ y: 16, width: 120, height: 48 })) chart.setAttribute(key, length);
      const left = CELL.width * (k % CELL.columns);
      const top = CELL.height * Math.floor(k / CELL.columns);
      drawing.append(draw("g", { transform: `translate(${left} ${top})` },
        textIn(name, 0, 10), textIn(value, 120, 10, "end"), chart));
    });
    const columns = Math.min(CELL.columns, peers.length);
    return asPicture(drawing, CELL.width * columns - 30, CELL.height * Math.ceil(peers.length / CELL.columns));
  };
  const save = (name, type, content) => {
    const link = make("a", { download: name, href: URL.createObjectURL(new Blob([content], { type })) });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };
  const saveSvg = (name, drawing) => save(`${name}.svg`, "image/svg+xml", new XMLSerializer().serializeToString(drawing));
  const savePng = (name, drawing) => {
    const { width, height } = drawing.viewBox.baseVal;
    const image = new Image();
    image.addEventListener("load", () => {
      const canvas = make("canvas", { width: 3 * width, height: 3 * height });
      const context = canvas.getContext("2d");
      context.fillStyle = getComputedStyle(document.body).backgroundColor;
      context.fillRect(0, 0, canvas.width, canvas.height);
      context.drawImage(image, 0, 0, canvas.width, canvas.height);
      canvas.toBlob(blob => save(`${name}.png`, "image/png", blob), "image/png");
    });
    const text = new XMLSerializer().serializeToString(drawing);
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  };
  const saveButtons = (title, drawPicture) => {
    const name = title.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "") || "picture";
    return [
      button("SVG", `Save ${title} as SVG`, () => saveSvg(name, drawPicture())),
      button("PNG", `Save ${title} as PNG`, () => savePng(name, drawPicture())),
    ];
  };
  const addTools = figure => {
    const chart = figure.querySelector("svg.chart");
    if (!chart) return;
    const title = figure.querySelector("figcaption strong").textContent;
    const tools = make("div", { class: "tools" }, ...saveButtons(title, () => picture(chart)));
    figure.append(tools);
    const rounds = find("g.round", chart);
    if (rounds.length > 1) tools.append(...roundTools(chart, rounds));
  };

  /* The graph of the last rounds, one after another. */
  const roundTools = (chart, rounds) => {
    const numbers = rounds.map(round => round.dataset.round);
    const last = rounds.length - 1;
    const note = chart.closest("figure").querySelector("figcaption span");
    const noteOfLast = note.textContent;
    const labelOfLast = chart.getAttribute("aria-label");
    const output = make("output");
    const slider = make("input", { type: "range", min: 0, max: last, "aria-label": "Round of the graph" });
    const show = k => {
      slider.value = k;
      slider.setAttribute("aria-valuetext", `round ${numbers[k]}`);
      output.textContent = `round ${numbers[k]}`;
      chart.dataset.shown = k < last ? numbers[k] : "";
      const noteOfEarlier = `Who received from whom in round ${numbers[k]}. The marks of the peers are those of round ${numbers[last]}.`;
      note.textContent = k < last ? noteOfEarlier : noteOfLast;
      chart.setAttribute("aria-label", k < last ? noteOfEarlier : labelOfLast);
      rounds.forEach((round, n) => n === k ? round.removeAttribute("display") : round.setAttribute("display", "none"));
    };
    let timer = 0;
    const stop = () => { clearInterval(timer); timer = 0; chart.classList.remove("playing"); play.textContent = "▶"; play.setAttribute("aria-label", "Play the rounds"); };
    const play = button("▶", "Play the rounds", () => {
      if (timer) return stop();
      chart.classList.add("playing");
      play.textContent = "❚❚";
      play.setAttribute("aria-label", "Pause the rounds");
      timer = setInterval(() => {
        if (!chart.isConnected) return stop();
        show((Number(slider.value) + 1) % rounds.length);
      }, 1200);
    });
    slider.addEventListener("input", () => { stop(); show(Number(slider.value)); });
    const shown = numbers.indexOf(chart.dataset.shown);
    show(shown < 0 ? last : shown);
    return [play, slider, output];
  };

  /* Small charts of peers in another order. */
  const sortPeers = list => {
    const key = choices.get("sort") || "score";
    const compare = key === "name"
      ? (a, b) => a.dataset.name.localeCompare(b.dataset.name, "en", { numeric: true })
      : (a, b) => Number(a.dataset[key]) - Number(b.dataset[key]);
    list.append(...[...list.children].sort(compare));
  };
  const addSorts = list => {
    const tools = make("div", { class: "tools", role: "group", "aria-label": "The charts of the peers" }, "Sort by ");
    for (const key of list.dataset.sorts.split(" ")) {
      const sort = button(key, `Sort by ${key}`, () => choose(choices => choices.set("sort", key)));
      sort.dataset.sort = key;
      tools.append(sort);
    }
    tools.append(...saveButtons("Peers", () => pictureOfPeers(list)));
    list.before(tools);
  };

  /* Rows, reference and metric of a comparison. */
  const resultsOf = root => root.querySelector("#results table.cards:has(tr[data-key])");
  const labelOf = row => row.querySelector("th").textContent.trim();
  const addChoices = table => {
    const rows = find("tbody tr", table);
    const fieldset = make("fieldset", {}, make("legend", {}, "Rows"));
    for (const row of rows) {
      const label = labelOf(row);
      const box = make("input", { type: "checkbox", "data-label": label });
      box.addEventListener("change", () => choose(choices => {
        const hidden = new Set(choices.getAll("hide"));
        box.checked ? hidden.delete(label) : hidden.add(label);
        choices.delete("hide");
        for (const each of hidden) choices.append("hide", each);
      }));
      fieldset.append(make("label", {}, box, label));
    }
    const form = make("div", { class: "choices", role: "group", "aria-label": "What the page compares" }, fieldset);
    const addSelect = (key, text, options) => {
      const select = make("select", { "data-choice": key });
      for (const [value, shown] of options) select.append(make("option", { value }, shown));
      select.addEventListener("change", () => choose(choices => select.value ? choices.set(key, select.value) : choices.delete(key)));
      form.append(make("label", {}, text, select));
    };
    if (document.querySelector("table.differences")) {
      addSelect("reference", "Compare with", [["", "as written"], ...rows.map(row => [labelOf(row), labelOf(row)])]);
    }
    const metrics = find("th[data-metric]", table).map(heading => heading.dataset.metric);
    if (metrics.length > 1) addSelect("metric", "Metric", [["", "all"], ...metrics.map(metric => [metric, metric])]);
    table.closest(".scrolling").before(form);
  };
  const hideRows = hidden => {
    let style = document.getElementById("hidden-rows");
    if (!style) document.head.append(style = make("style", { id: "hidden-rows" }));
    style.textContent = hidden.map(key =>
      `.r${key}, main tr[data-key="${key}"], .legend li:has(.r${key}), .wins li:has(.r${key}) { display: none !important; }`).join("\n");
    for (const figure of find("figure[data-rows]")) {
      figure.toggleAttribute("data-hidden", figure.dataset.rows.split(" ").some(key => hidden.includes(key)));
    }
  };
  const written = new WeakMap(); /* By cell: what the page had before a reference was chosen. */
  const compareWith = (table, reference) => {
    const matrix = document.querySelector("table.differences");
    if (!matrix) return;
    const column = find("tbody tr", matrix).findIndex(row => labelOf(row) === reference);
    const heading = table.querySelector("thead th.difference");
    if (!heading) return;
    const put = (cell, content) => {
      if (!written.has(cell)) written.set(cell, [...cell.childNodes]);
      cell.replaceChildren(...(content || written.get(cell)));
    };
    put(heading, column < 0 ? null : [`Difference to ${reference}`]);
    for (const row of find("tbody tr", table)) {
      const from = matrix.querySelector(`tr[data-key="${row.dataset.key}"]`);
      const cell = row.querySelector("td.difference");
      if (from && cell) {
        const copy = column < 0 ? null : [...from.children[column + 1].cloneNode(true).childNodes];
        put(cell, copy);
        cell.dataset.label = heading.textContent;
      }
    }
  };
  const order = new WeakMap(); /* By table: the rows in the order of the page. */
  const sortBy = (table, metric) => {
    const headings = find("thead th", table);
    const column = headings.findIndex(heading => heading.dataset.metric === metric);
    const body = table.querySelector("tbody");
    if (!order.has(table)) order.set(table, find("tr", body));
    const rows = [...order.get(table)];
    if (column >= 0) {
      const sign = headings[column].dataset.better === "higher" ? -1 : 1;
      const value = row => parseFloat(row.children[column].textContent);
      rows.sort((a, b) => (isNaN(value(a)) - isNaN(value(b))) || sign * (value(a) - value(b)) || 0);
    }
    body.append(...rows);
    headings.forEach((heading, k) => k === column ? heading.setAttribute("aria-sort", heading.dataset.better === "higher" ? "descending" : "ascending") : heading.removeAttribute("aria-sort"));
    for (const figure of find("figure[data-metric]")) {
      figure.toggleAttribute("data-other", Boolean(metric) && figure.dataset.metric !== metric);
    }
  };

  const apply = () => {
    for (const list of find(".multiples")) sortPeers(list);
    for (const sort of find("button[data-sort]")) sort.setAttribute("aria-pressed", (choices.get("sort") || "score") === sort.dataset.sort);
    const table = resultsOf(document);
    if (!table) return;
    const hidden = choices.getAll("hide");
    hideRows(find("tbody tr", table).filter(row => hidden.includes(labelOf(row))).map(row => row.dataset.key));
    compareWith(table, choices.get("reference") || "");
    sortBy(table, choices.get("metric") || "");
    for (const figure of find("figure[data-rows], figure[data-metric]")) {
      figure.hidden = figure.hasAttribute("data-hidden") || figure.hasAttribute("data-other");
    }
    for (const box of find(".choices input")) box.checked = !hidden.includes(box.dataset.label);
    for (const select of find(".choices select")) select.value = choices.get(select.dataset.choice) || "";
  };

  const enhance = root => {
    for (const figure of find("figure", root)) addTools(figure);
    for (const list of find(".multiples", root)) addSorts(list);
    for (const log of find(".log", root)) log.scrollTop = log.scrollHeight;
    const table = root.id === "results" || root === document ? resultsOf(root.parentNode || root) : null;
    if (table) addChoices(table);
  };

  /* Links to sections must not replace the choices in the address. */
  document.addEventListener("click", event => {
    const link = event.target.closest("a[href^='#']");
    if (!link || ![...choices].length) return;
    event.preventDefault();
    document.getElementById(link.hash.slice(1))?.scrollIntoView();
  });
  addEventListener("hashchange", () => {
    if (!location.hash.includes("=") && location.hash) return;
    for (const key of [...choices.keys()]) choices.delete(key);
    for (const [key, value] of read()) choices.append(key, value);
    apply();
  });

  /* Live pages: the server sends the parts that have changed, as HTML of the same templates. */
  const parse = html => {
    const template = make("template");
    template.innerHTML = html;
    return template.content.firstElementChild;
  };
  /* What a reader has opened, scrolled to, chosen or focused stays as it is. */
  const CONTROLS = "a, button, input, select, summary, .log";
  const SCROLLERS = ".scrolling, .log";
  const nameOf = control => control.getAttribute("href") || control.getAttribute("aria-label") || control.textContent;
  const swap = (old, html) => {
    const part = parse(html);
    const open = find("details", old).map(details => details.open);
    const shown = find("svg.chart", old).map(chart => chart.dataset.shown || "");
    const positions = find(SCROLLERS, old).map(box => ({
      left: box.scrollLeft, top: box.scrollTop, isAtEnd: box.scrollTop + box.clientHeight >= box.scrollHeight - 2,
    }));
    const focused = find(CONTROLS, old).indexOf(document.activeElement);
    const focusedName = focused < 0 ? "" : nameOf(document.activeElement);
    const playing = Boolean(old.querySelector(".playing"));

    find("details", part).forEach((details, k) => { details.open = Boolean(open[k]); });
    find("svg.chart", part).forEach((chart, k) => { chart.dataset.shown = shown[k] || ""; });
    old.replaceWith(part);
    enhance(part);
    find(SCROLLERS, part).forEach((box, k) => {
      if (!positions[k]) return;
      box.scrollLeft = positions[k].left;
      if (!positions[k].isAtEnd) box.scrollTop = positions[k].top;
    });
    if (focused >= 0) {
      const controls = find(CONTROLS, part);
      const same = controls.filter(control => nameOf(control) === focusedName);
      const control = same.includes(controls[focused]) ? controls[focused] : same[0] || controls[focused];
      control?.focus({ preventScroll: true });
    }
    if (playing) part.querySelector("button[aria-label='Play the rounds']")?.click();
    return part;
  };
  const add = (html, before) => {
    const part = parse(html);
    before ? before.after(part) : document.querySelector("main").prepend(part);
    enhance(part);
    return part;
  };
  const lose = text => { document.querySelector(".lost").textContent = text; };
  /* A part in which a reader has selected text, perhaps to copy it, waits until they have done so. */
  const waiting = new Map();
  let shownOrder = [];
  const hasSelection = part => {
    const selection = getSelection();
    return !selection.isCollapsed && selection.containsNode(part, true);
  };
  const showChanges = () => {
    let before = null;
    for (const name of shownOrder) {
      let part = document.getElementById(name);
      if (waiting.has(name) && !(part && hasSelection(part))) {
        part = part ? swap(part, waiting.get(name)) : add(waiting.get(name), before);
        waiting.delete(name);
      }
      if (name !== "top") before = part;
    }
    for (const part of find("main > section")) if (!shownOrder.includes(part.id)) part.remove();
    apply();
  };
  const update = ({ title, order, changed }) => {
    document.title = `${title} – ${document.title.split(" – ").pop()}`;
    shownOrder = order;
    for (const [name, html] of Object.entries(changed)) waiting.set(name, html);
    showChanges();
    document.body.dataset.updates = Number(document.body.dataset.updates || 0) + 1;
  };
  document.addEventListener("selectionchange", () => { if (waiting.size && getSelection().isCollapsed) showChanges(); });
  const RETRY_MS = 5000; /* Where the browser does not try again by itself: the server has refused. */
  const follow = start => {
    let [address, seen] = start.split("?seen=");
    let source = null;
    const listen = () => {
      source = new EventSource(`${address}?seen=${seen}`);
      source.addEventListener("open", () => lose(""));
      source.addEventListener("parts", event => {
        const parts = JSON.parse(event.data);
        seen = parts.digest;
        update(parts);
      });
      source.addEventListener("gone", () => { source.close(); lose("This run was deleted; the page shows how it was."); });
      source.addEventListener("error", () => {
        lose("No connection to dispfl view; the page may be out of date.");
        if (source.readyState === EventSource.CLOSED) setTimeout(listenIfVisible, RETRY_MS);
      });
    };
    /* A browser has few connections to one server: a tab that nobody sees keeps none. */
    const listenIfVisible = () => {
      source?.close();
      if (!document.hidden) listen();
    };
    document.addEventListener("visibilitychange", listenIfVisible);
    listenIfVisible();
  };

  enhance(document);
  apply();
  if (document.body.dataset.events) follow(document.body.dataset.events);
})();
