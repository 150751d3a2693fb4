"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const element = (tag, text, className) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  };
  const digits = (value) => (value === 0 ? "0" : Number(value.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 }));
  const share = (value) => (100 * value).toFixed(0) + " %";
  const fixed = (places) => (value) => value.toFixed(places);
  const megabytes = (value) => (value === 0 ? "0" : value < 0.1 ? value.toPrecision(2) : value < 10 ? value.toFixed(2) : value.toFixed(0));

  const state = { data: "", sort: "rank", down: false, search: "", complete: false };
  const card = () => data.data.find((one) => one.name === state.data);
  const complete = new Set(data.overall.filter((one) => one.complete).map((one) => one.method));
  const score = (value) => (card().percent ? (100 * value).toFixed(1) + " %" : digits(value));
  const column = (key, title, text, note) => ({ key, title, text, note });
  const common = () => [
    column("ahead", "Ahead", share, "seeds on which the clients together are surely better off than alone, by loss"),
    column("behind", "Behind", share, "seeds on which they are surely worse off"),
    column("improved", "Gained", share, "single clients that are surely better off than alone, by loss"),
    column("harmed", "Lost", share, "single clients that are surely worse off"),
    column("mb", "MB", megabytes, "megabytes up and down until the round that is deployed"),
    column("cpu_seconds", "CPU s", fixed(1), "of the processor, all settings together, on one core"),
  ];
  const columns = () => state.data === ""
    ? [
        column("method", "Method"),
        column("mean_rank", "Rank", fixed(2), "1 is best, over the data sets it ran on"),
        column("wins", "Wins", String, "data sets on which it is best"),
        column("data_sets", "Sets", String, "data sets it ran on"),
        column("error_ratio", "Error", fixed(3), "relative to training alone, geometric mean"),
        column("worst_ratio", "Worst tenth", fixed(3), "the same for the worst-served tenth of the clients"),
        column("newcomer_ratio", "New clients", fixed(3), "the same for clients that join afterwards"),
        ...common(),
      ]
    : [
        column("method", "Method"),
        column("rank", "Rank", String),
        column("mean", `Test ${card().metric}`, score, "mean over clients and seeds"),
        column("sd", "± over seeds", (value) => (card().percent ? (100 * value).toFixed(1) : digits(value))),
        column("worst_decile", "Worst tenth", score, "mean over the worst-served tenth of the clients"),
        column("newcomers", "New clients", score, "clients that join afterwards"),
        ...common(),
        column("trials", "Trials", String, "settings tried"),
      ];
  const rows = () => (state.data === "" ? data.overall : data.lines.filter((one) => one.data === state.data));

  const chosen = () => {
    const wanted = state.search.trim().toLowerCase();
    const list = rows().filter((one) => one.method.toLowerCase().includes(wanted) && (!state.complete || complete.has(one.method)));
    const known = columns().some((one) => one.key === state.sort) ? state.sort : columns()[1].key;
    const order = state.down ? -1 : 1;
    return list.sort((a, b) => {
      const [first, second] = [a[known], b[known]];
      if (first === second) return a.method < b.method ? -1 : 1;
      if (first === null) return 1;
      if (second === null) return -1;
      return order * (first < second ? -1 : 1);
    });
  };

  const render = () => {
    const shown = columns();
    if (!shown.some((one) => one.key === state.sort)) state.sort = shown[1].key;
    const head = element("tr");
    for (const one of shown) {
      const cell = element("th");
      cell.scope = "col";
      cell.setAttribute("aria-sort", one.key !== state.sort ? "none" : state.down ? "descending" : "ascending");
      const button = element("button", one.title);
      button.type = "button";
      button.dataset.sort = one.key;
      if (one.note) button.title = one.note;
      cell.append(button);
      head.append(cell);
    }
    const list = chosen();
    const body = list.map((line) => {
      const row = element("tr");
      for (const one of shown) {
        const cell = element(one.key === "method" ? "th" : "td");
        const value = line[one.key];
        if (one.key === "method") {
          cell.scope = "row";
          cell.title = data.summaries[line.method] || "";
        }
        cell.textContent = value === null || value === undefined ? "–" : one.text ? one.text(value) : value;
        row.append(cell);
      }
      return row;
    });
    document.querySelector("#board thead").replaceChildren(head);
    document.querySelector("#board tbody").replaceChildren(...body);
    const sorted = shown.find((one) => one.key === state.sort);
    byId("status").textContent = `${list.length} of ${rows().length} methods, sorted by ${sorted.title.toLowerCase()}, ${state.down ? "largest" : "smallest"} first`;
    const here = card();
    byId("explained").textContent = here
      ? `${here.name}: ${here.task}, ${here.heterogeneity}; ${here.metric}, ${here.higher ? "higher" : "lower"} is better`
      : "All data sets: below 1 is better than training alone. Ranks of methods that ran on few data sets do not compare.";
    for (const one of document.querySelectorAll(".fronts")) one.hidden = one.dataset.of !== state.data;
  };

  const change = (changes) => {
    Object.assign(state, changes);
    render();
  };
  document.querySelector("#board thead").addEventListener("click", (event) => {
    const key = event.target.dataset.sort;
    if (!key) return;
    change({ sort: key, down: state.sort === key ? !state.down : false });
    document.querySelector(`[data-sort="${key}"]`).focus();
  });
  byId("data-set").addEventListener("change", (event) => change({ data: event.target.value, down: false, sort: "rank" }));
  byId("search").addEventListener("input", (event) => change({ search: event.target.value }));
  byId("complete").addEventListener("change", (event) => change({ complete: event.target.checked }));

  const root = document.documentElement;
  const setTheme = (theme) => {
    root.dataset.theme = theme;
    byId("theme").textContent = theme === "dark" ? "Light colours" : "Dark colours";
    byId("theme").setAttribute("aria-pressed", String(theme === "dark"));
  };
  setTheme(window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  byId("theme").addEventListener("click", () => setTheme(root.dataset.theme === "dark" ? "light" : "dark"));
  render();
})();
