"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const percent = data.percent;
  const PAGE = 25;
  const SIGNS = { better: "▲", up: "△", same: "▬", down: "▽", worse: "▼", unknown: "?" };

  const digits = (value) => {
    const size = Math.abs(value);
    if (size === 0) return "0";
    if (size < 1e-4 || size >= 1e9) return value.toPrecision(3);
    const places = Math.max(0, 3 - Math.floor(Math.log10(size)));
    return value.toLocaleString("en", { minimumFractionDigits: places, maximumFractionDigits: places });
  };
  const show = (value) => (value === null ? "–" : percent ? (100 * value).toFixed(1) + " %" : digits(value));
  const showGain = (value) => {
    if (value === null) return "–";
    const text = percent ? (100 * value).toFixed(1) : digits(value);
    return (value > 0 && Number(text.replace(/,/g, "")) !== 0 ? "+" : "") + text.replace(/^-(0(\.0+)?)$/, "$1").replace("-", "−");
  };
  const range = (low, high, text) => (low === null || high === null ? "–" : text(low) + " to " + text(high));

  const element = (tag, text, className) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  };

  /* Who gained, who lost: one list, shown as a table or as cards, a page at a time. */
  const gains = data.alone !== null && data.runs.some((run) => !run.alone);
  const state = { run: data.main, sort: gains ? "gain" : "name", down: false, page: 0, search: "", verdict: "", view: "table" };
  const run = () => data.runs[state.run];
  const alone = () => (data.alone === null ? null : data.runs[data.alone]);
  const columns = [
    { key: "name", title: data.client_column ? `Client (${data.client_column})` : "Client", value: (k) => data.names[k], left: true },
    { key: "rows", title: "Training rows", value: (k) => data.rows.train[k], text: (v) => v.toLocaleString("en"), when: () => data.rows !== null },
    { key: "alone", title: "Alone", value: (k) => alone().value[k], text: show, when: () => gains },
    { key: "value", title: () => run().label, value: (k) => run().value[k], text: show },
    { key: "interval", title: "95 % interval", value: (k) => run().low[k], text: (v, k) => range(run().low[k], run().high[k], show), when: () => data.rows !== null },
    { key: "gain", title: () => (percent ? "Gain (points)" : "Gain"), value: (k) => run().gain[k], text: showGain, when: () => gains },
    { key: "verdict", title: "Against training alone", value: (k) => Object.keys(SIGNS).indexOf(run().verdict[k]), left: true, when: () => gains },
    { key: "group", title: "Group", value: (k) => run().group[k], text: (v) => (v === null ? "–" : v), when: () => run().group !== null },
    { key: "cluster", title: "Known cluster", value: (k) => data.clusters[k], left: true, when: () => data.clusters !== null },
  ];
  const shownColumns = () => columns.filter((column) => !column.when || column.when());
  const collator = new Intl.Collator("en", { numeric: true });

  const chosen = () => {
    const wanted = state.search.trim().toLowerCase();
    const found = [];
    for (let k = 0; k < data.names.length; k++) {
      if (wanted && !data.names[k].toLowerCase().includes(wanted)) continue;
      if (state.verdict && run().verdict[k] !== state.verdict) continue;
      found.push(k);
    }
    const column = columns.find((one) => one.key === state.sort);
    const sign = state.down ? -1 : 1;
    const values = new Map(found.map((k) => [k, column.value(k)]));
    return found.sort((a, b) => {
      const x = values.get(a), y = values.get(b);
      if (x === null || y === null) return (x === null) - (y === null) || a - b;
      return sign * (typeof x === "string" ? collator.compare(x, y) : x - y) || a - b;
    });
  };

  const verdictText = (which) => SIGNS[which] + " " + data.verdicts[which];

  const renderHead = () => {
    const row = document.querySelector("#client-table thead tr");
    row.replaceChildren(...shownColumns().map((column) => {
      const cell = element("th", undefined, column.left ? "left" : "");
      cell.scope = "col";
      const sorted = state.sort === column.key;
      cell.setAttribute("aria-sort", sorted ? (state.down ? "descending" : "ascending") : "none");
      const title = typeof column.title === "function" ? column.title() : column.title;
      const button = element("button", title + (sorted ? (state.down ? " ↓" : " ↑") : ""));
      button.type = "button";
      button.dataset.sort = column.key;
      cell.append(button);
      return cell;
    }));
  };

  const renderRow = (k) => {
    const row = element("tr");
    for (const column of shownColumns()) {
      const cell = element(column.key === "name" ? "th" : "td", undefined, column.left ? "left" : "");
      if (column.key === "name") cell.scope = "row";
      const value = column.value(k);
      if (column.key === "verdict") {
        cell.textContent = verdictText(run().verdict[k]);
        cell.className = "left " + run().verdict[k];
      } else {
        cell.textContent = column.text ? column.text(value, k) : value;
      }
      row.append(cell);
    }
    return row;
  };

  const most = Math.max(...data.runs.flatMap((one) => one.high.concat(one.value)).filter((v) => v !== null), 1e-12);
  const renderCard = (k) => {
    const card = element("li", undefined, "card");
    const heading = element("h3", data.names[k]);
    if (data.client_column) heading.prepend(element("span", data.client_column + ": ", "quiet"));
    card.append(heading);
    if (data.rows) card.append(element("p", `Rows: ${data.rows.train[k]} training, ${data.rows.validation[k]} validation, ${data.rows.test[k]} test`, "quiet"));
    if (data.clusters) card.append(element("p", "Known cluster: " + data.clusters[k], "quiet"));
    data.runs.forEach((one, index) => {
      if (data.runs.length > 6 && index !== state.run && index !== data.alone) return;
      const line = element("div", undefined, "score" + (index === state.run ? " main" : ""));
      line.append(element("span", one.label), element("span", show(one.value[k])));
      if (one.low[k] !== null && one.value[k] !== null) {
        const bar = element("div", undefined, "bar");
        bar.setAttribute("aria-hidden", "true");
        const scale = percent ? 1 : most;
        const span = element("i"), mark = element("b");
        span.style.left = (100 * one.low[k]) / scale + "%";
        span.style.width = (100 * (one.high[k] - one.low[k])) / scale + "%";
        mark.style.left = (100 * one.value[k]) / scale + "%";
        bar.append(span, mark);
        line.append(bar, element("span", "95 % interval " + range(one.low[k], one.high[k], show), "small"));
      }
      if (one.gain[k] !== null) {
        const unit = percent ? " points" : "";
        line.append(element("span", `${verdictText(one.verdict[k])}: ${showGain(one.gain[k])}${unit}`, "small " + one.verdict[k]));
      }
      if (one.group && one.group[k] !== null) line.append(element("span", "In group " + one.group[k], "small"));
      if (one.learns_from) line.append(element("span", "Learns most from " + one.learns_from[k], "small"));
      card.append(line);
    });
    return card;
  };

  const render = (everything) => {
    const list = chosen();
    const pages = Math.max(1, Math.ceil(list.length / PAGE));
    state.page = Math.min(state.page, pages - 1);
    const part = everything ? list.slice(0, 500) : list.slice(state.page * PAGE, (state.page + 1) * PAGE);
    renderHead();
    const cards = state.view === "cards";
    byId("table-view").hidden = cards;
    byId("cards").hidden = !cards;
    if (cards) byId("cards").replaceChildren(...part.map(renderCard));
    else document.querySelector("#client-table tbody").replaceChildren(...part.map(renderRow));
    const column = columns.find((one) => one.key === state.sort);
    const title = typeof column.title === "function" ? column.title() : column.title;
    byId("status").textContent = `${list.length.toLocaleString("en")} of ${data.names.length.toLocaleString("en")} clients, ` +
      `sorted by ${title.toLowerCase()}, ${state.down ? "largest" : "smallest"} first`;
    byId("page").textContent = `Page ${state.page + 1} of ${pages}`;
    byId("pages").hidden = pages === 1;
    byId("pages").style.display = pages === 1 ? "none" : "";
    byId("previous").disabled = state.page === 0;
    byId("next").disabled = state.page === pages - 1;
  };

  const change = (changes) => {
    Object.assign(state, { page: 0 }, changes);
    render();
  };

  document.querySelector("#client-table thead").addEventListener("click", (event) => {
    const key = event.target.dataset.sort;
    if (!key) return;
    change({ sort: key, down: state.sort === key ? !state.down : false });
    document.querySelector(`[data-sort="${key}"]`).focus();
  });
  byId("search").addEventListener("input", (event) => change({ search: event.target.value }));
  byId("verdict").addEventListener("change", (event) => change({ verdict: event.target.value }));
  byId("run").addEventListener("change", (event) => change({ run: Number(event.target.value) }));
  byId("previous").addEventListener("click", () => { state.page -= 1; render(); });
  byId("next").addEventListener("click", () => { state.page += 1; render(); });
  for (const radio of document.querySelectorAll('[name="view"]')) {
    radio.addEventListener("change", () => change({ view: radio.value }));
  }
  const compared = data.runs.map((one, k) => [one, k]).filter(([one]) => !one.alone || data.runs.length === 1);
  byId("run").append(...compared.map(([one, k]) => {
    const option = element("option", one.label);
    option.value = k;
    option.selected = k === state.run;
    return option;
  }));
  byId("run-label").hidden = compared.length < 2;
  byId("run-label").style.display = compared.length < 2 ? "none" : "";
  byId("verdict-label").style.display = gains ? "" : "none";
  byId("verdict").append(...Object.keys(SIGNS).map((which) => {
    const option = element("option", verdictText(which));
    option.value = which;
    return option;
  }));
  if (window.matchMedia("(max-width: 40rem)").matches) {
    state.view = "cards";
    document.querySelector('[name="view"][value="cards"]').checked = true;
  }
  render();

  /* Charts: drawn when they come near the window, redrawn when the theme changes. */
  const root = document.documentElement;
  const tokens = () => {
    const style = getComputedStyle(root);
    const read = (name) => style.getPropertyValue("--" + name).trim();
    const found = { $sequence: [[0, read("low")], [1, read("high")]] };
    for (const name of ["text", "muted", "good", "bad", "grid", "background", "line"]) found["$" + name] = read(name);
    for (let k = 0; k < 8; k++) found["$c" + k] = read("c" + k);
    return found;
  };
  const faded = (colour, share) => {
    const part = (from) => parseInt(colour.slice(from, from + 2), 16);
    return `rgba(${part(1)},${part(3)},${part(5)},${share})`;
  };
  const themed = (value, known) => {
    if (typeof value === "string" && value[0] === "$") {
      const [name, share] = value.split("/");
      if (!(name in known)) return value;
      return share ? faded(known[name], share) : known[name];
    }
    if (Array.isArray(value)) return value.map((item) => (item !== null && (typeof item === "object" || typeof item === "string") ? themed(item, known) : item));
    if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, themed(item, known)]));
    return value;
  };
  const layoutOf = (panel, known, place) => {
    const narrow = place.clientWidth < 520;
    const layout = themed(panel.layout, known);
    for (const side of ["xaxis", "yaxis"]) {
      layout[side] = Object.assign({ gridcolor: known.$grid, linecolor: known.$line, zerolinecolor: known.$muted }, layout[side]);
    }
    return Object.assign({
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: known.$text, family: "system-ui, sans-serif", size: narrow ? 11 : 13 },
      margin: { l: 50, r: 15, t: 15, b: 45 }, height: place.clientHeight, autosize: true,
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
      hoverlabel: { bgcolor: known.$background, bordercolor: known.$muted, font: { color: known.$text } },
      dragmode: narrow ? false : "zoom",
    }, layout);
  };
  // Where nothing can hover the buttons would lie on the chart all the time.
  const displayModeBar = matchMedia("(hover: hover)").matches ? "hover" : false;
  const config = {
    responsive: true,
    displaylogo: false,
    displayModeBar,
    modeBarButtonsToRemove: ["lasso2d", "select2d"],
  };
  const drawn = new Set();
  const draw = (place) => {
    const known = tokens();
    const panel = data.panels[place.dataset.panel];
    drawn.add(place);
    const height = Math.round(panel.height * (root.classList.contains("paper") ? 0.78 : 1));
    place.style.height = height + "px";
    return Plotly.react(place, themed(panel.data, known), layoutOf(panel, known, place), config)
      .then(() => place.setAttribute("data-drawn", root.dataset.theme));
  };
  const charts = [...document.querySelectorAll(".chart")];
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      watcher.unobserve(entry.target);
      draw(entry.target);
    }
  }, { rootMargin: "300px" });

  const setTheme = (theme) => {
    root.dataset.theme = theme;
    byId("theme").textContent = theme === "dark" ? "Light colours" : "Dark colours";
    byId("theme").setAttribute("aria-pressed", String(theme === "dark"));
    for (const place of drawn) if (place.clientWidth) draw(place);
  };
  const preference = window.matchMedia("(prefers-color-scheme: dark)");
  let asked = false;
  setTheme(preference.matches ? "dark" : "light");
  preference.addEventListener("change", (event) => { if (!asked) setTheme(event.matches ? "dark" : "light"); });
  byId("theme").addEventListener("click", () => { asked = true; setTheme(root.dataset.theme === "dark" ? "light" : "dark"); });
  for (const place of charts) watcher.observe(place);

  /* On paper: light colours, all charts, many rows. "?print" shows the page like this from the start. */
  let before = null;
  let opened = [];
  const prepare = () => {
    before = root.dataset.theme;
    opened = [...document.querySelectorAll("details.repeat:not([open]), details.client:not([open])")];
    for (const one of opened) one.open = true;
    state.view = "table";
    setTheme("light");
    render(true);
    for (const place of charts) if (place.clientWidth) draw(place);
  };
  if (location.search === "?print") {
    root.classList.add("paper");
    prepare();
  }
  window.addEventListener("beforeprint", () => { if (!root.classList.contains("paper")) prepare(); });
  window.addEventListener("afterprint", () => {
    if (root.classList.contains("paper")) return;
    for (const one of opened) one.open = false;
    setTheme(before);
    render();
  });
})();
