"use strict";
(() => {
  const root = document.documentElement;
  const all = (selector, node = document) => [...node.querySelectorAll(selector)];
  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const memory = (() => {  // Some browsers have no storage for files.
    try { sessionStorage.setItem("realhf", "1"); return sessionStorage; } catch { return null; }
  })();
  const recall = (key) => memory && memory.getItem(location.pathname + key);
  const remember = (key, value) => memory && memory.setItem(location.pathname + key, value);

  // Light and dark

  const themeButton = document.getElementById("theme");
  function setTheme(theme) {
    root.dataset.theme = theme;
    themeButton.textContent = theme === "dark" ? "Light" : "Dark";
    all(".plot").filter((node) => node.shown).forEach((node) => Plotly.relayout(node, colours(node.shown.layout)));
  }
  themeButton.onclick = () => { const theme = root.dataset.theme === "dark" ? "light" : "dark"; remember("theme", theme); setTheme(theme); };

  function colours(layout) {
    const changes = { "font.color": css("--ink"), paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      "hoverlabel.bgcolor": css("--paper"), "hoverlabel.font.color": css("--ink"), "hoverlabel.bordercolor": css("--line") };
    for (const axis of new Set(["xaxis", "yaxis", ...Object.keys(layout).filter((key) => /^[xy]axis\d*$/.test(key))])) {
      changes[axis + ".gridcolor"] = css("--line");
      changes[axis + ".zerolinecolor"] = css("--line");
      changes[axis + ".linecolor"] = css("--line");
      changes[axis + ".tickfont.color"] = css("--soft");
    }
    return changes;
  }

  function assign(target, path, value) {
    const names = path.split(".");
    const last = names.pop();
    let place = target;
    for (const name of names) place = place[name] ??= {};
    place[last] = value;
  }

  // Figures: each is drawn when it comes into view

  function draw(node, figure) {
    const layout = structuredClone(figure.layout);
    for (const [path, value] of Object.entries(colours(layout))) assign(layout, path, value);
    if (innerWidth < 600) {
      layout.margin = { ...layout.margin, ...(layout.meta && layout.meta.narrow_margin) };
      if (layout.legend) Object.assign(layout.legend, { orientation: "h", x: 0, y: -0.26, xanchor: "left", yanchor: "top" });
    }
    node.shown = figure;
    if (layout.height) node.style.minHeight = layout.height + "px";
    Plotly.react(node, smoothed(node, figure.data), layout,
      { responsive: true, displaylogo: false, displayModeBar: false, scrollZoom: false });
  }
  const parsed = (id) => JSON.parse(document.getElementById(id).textContent);
  const inView = new IntersectionObserver((entries) => {
    for (const entry of entries.filter((one) => one.isIntersecting)) {
      inView.unobserve(entry.target);
      entry.target.drawNow();
    }
  }, { rootMargin: "400px" });

  // Curves

  const smoothings = all(".smoothing");
  function smoothed(node, data) {
    const slider = node.closest("section") && node.closest("section").querySelector(".smoothing");
    const weight = slider ? Number(slider.value) : 0;
    return data.map((trace) => trace.meta && trace.meta.smooth ? { ...trace, y: average(trace.y, weight) } : trace);
  }
  function average(values, weight) {  // An exponential mean, without a bias to its beginning.
    let sum = 0, count = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = weight * sum + (1 - weight) * value;
      count = weight * count + (1 - weight);
      return Number((sum / count).toPrecision(7));
    });
  }
  for (const slider of smoothings) {
    slider.value = recall("smoothing") ?? slider.value;
    slider.oninput = () => {
      remember("smoothing", slider.value);
      all(".plot", slider.closest("section")).filter((node) => node.shown).forEach((node) => {
        smoothed(node, node.shown.data).forEach((trace, index) => {
          if (trace.meta && trace.meta.smooth) Plotly.restyle(node, { y: [trace.y] }, [index]);
        });
      });
    };
  }
  for (const node of all(".plot[data-figure]")) {
    node.drawNow = () => draw(node, parsed(node.dataset.figure));
    inView.observe(node);
  }

  // Steps by rank

  function wanted(text) {  // "0-3,8" -> a set of ranks; null: all
    const ranks = new Set();
    for (const part of text.split(",").map((one) => one.trim()).filter(Boolean)) {
      const match = /^(\d+)(?:\s*-\s*(\d+))?$/.exec(part);
      if (!match) return null;
      for (let rank = Number(match[1]); rank <= Number(match[2] ?? match[1]); rank++) ranks.add(rank);
    }
    return ranks.size ? ranks : null;
  }
  function ofRanks(figure, ranks) {
    if (!ranks) return figure;
    const layout = structuredClone(figure.layout);
    const data = figure.data.map((trace) => {
      const of = trace.meta && trace.meta.rank;
      if (of === undefined || of === null) return trace;
      if (!Array.isArray(of)) return { ...trace, visible: ranks.has(of) };
      const keep = of.map((rank) => ranks.has(rank));
      const cut = { ...trace, meta: { ...trace.meta, rank: of.filter((_, i) => keep[i]) } };
      for (const key of ["x", "y", "base", "text"]) {
        if (Array.isArray(trace[key])) cut[key] = trace[key].filter((_, i) => keep[i]);
      }
      return cut;
    });
    for (const key of Object.keys(layout).filter((name) => /^yaxis\d*$/.test(name))) {
      if (layout[key].categoryarray) {
        layout[key].categoryarray = layout[key].categoryarray.filter((name) => ranks.has(Number(name)));
      }
    }
    const shown = Math.max(4, ...Object.keys(layout).filter((name) => /^yaxis\d*$/.test(name)).map((name) => (layout[name].categoryarray || []).length));
    if (layout.meta && layout.meta.row_height) {
      layout.height = layout.meta.fixed_height + layout.meta.row_height * shown * layout.meta.panels;
    }
    return { data, layout };
  }
  for (const section of all("section").filter((one) => one.querySelector(".step-figure"))) {
    const step = section.querySelector("select.step");
    const ranks = section.querySelector("input.ranks");
    const nodes = all(".plot.of-step", section);
    const find = (index) => all(".step-figure", section).find((one) => one.dataset.step === step.value && one.dataset.index === index);
    const saved = recall("step");
    if (saved && [...step.options].some((option) => option.value === saved)) step.value = saved;
    ranks.value = recall("ranks") ?? "";
    for (const node of nodes) {
      node.drawNow = () => {
        const source = find(node.dataset.index);
        if (source) draw(node, ofRanks(JSON.parse(source.textContent), wanted(ranks.value)));
      };
      inView.observe(node);
    }
    const again = () => {
      remember("step", step.value);
      remember("ranks", ranks.value);
      nodes.filter((node) => node.shown).forEach((node) => node.drawNow());
    };
    step.onchange = again;
    ranks.oninput = again;
  }

  // Rollouts

  const PAGE = 8;
  function tint(value, low, high, isSigned) {
    if (value === null || value === undefined) return "";
    if (isSigned) {
      const share = Math.min(1, Math.abs(value) / (Math.max(Math.abs(low), Math.abs(high)) || 1));
      return `color-mix(in srgb, ${value < 0 ? "var(--bad)" : "var(--good)"} ${Math.round(70 * share)}%, transparent)`;
    }
    const share = high > low ? (value - low) / (high - low) : 0;
    return `color-mix(in srgb, var(--accent) ${Math.round(8 + 60 * share)}%, transparent)`;
  }
  const make = (name, className, text) => {
    const node = document.createElement(name);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const short = (value) => typeof value === "number" ? String(Number(value.toPrecision(4))) : String(value);

  function tokenSpans(rollout, colour, start, stop) {
    const box = document.createDocumentFragment();
    const row = { mask: rollout.response_mask, logprobs: rollout.logprobs, advantages: rollout.advantages, versions: rollout.token_versions }[colour];
    const known = (row || []).filter((value, i) => value !== null && rollout.response_mask[i]);
    const low = Math.min(...known), high = Math.max(...known);
    for (let i = start; i < stop; i++) {
      const span = make("span", "token", rollout.pieces ? rollout.pieces[i] : ` ${rollout.token_ids[i]}`);
      const isDrawn = Boolean(rollout.response_mask[i]);
      if (row && isDrawn) {
        if (colour === "mask") span.style.background = tint(0.5, 0, 1);
        else if (colour === "logprobs") span.style.background = tint(-row[i], -high, -low);
        else span.style.background = tint(row[i], low, high, colour === "advantages");
      }
      span.title = [`token ${i}: id ${rollout.token_ids[i]}`, isDrawn ? "sampled" : "not sampled",
        ...[["log-prob", rollout.logprobs], ["advantage", rollout.advantages], ["version", rollout.token_versions]]
          .filter(([, values]) => values && isDrawn && values[i] !== null).map(([name, values]) => `${name} ${short(values[i])}`)].join(", ");
      box.append(span);
    }
    return box;
  }
  function turn(role, className) {
    const node = make("div", `turn ${className}`);
    node.append(make("span", "role", role));
    return node;
  }
  function turnsOf(rollout, colour) {
    if (rollout.token_ids && rollout.response_mask) {
      const turns = [];
      const mask = rollout.response_mask;
      const first = mask.indexOf(1);
      let start = 0;
      for (let i = 1; i <= mask.length; i++) {
        if (i < mask.length && Boolean(mask[i]) === Boolean(mask[start])) continue;
        const [role, kind] = mask[start] ? ["model", "assistant"] : start < first || first < 0 ? ["prompt", "user"] : ["environment", "environment"];
        const node = turn(role, kind);
        node.append(tokenSpans(rollout, colour, start, i));
        turns.push(node);
        start = i;
      }
      return turns;
    }
    const messages = rollout.messages || [
      ...(Array.isArray(rollout.prompt) ? rollout.prompt : [{ role: "user", content: rollout.prompt ?? "" }]),
      { role: "assistant", content: rollout.completion ?? "" }];
    return messages.map((message) => {
      const node = turn(message.name ? `${message.role} ${message.name}` : message.role, message.role === "system" ? "user" : message.role);
      const calls = (message.tool_calls || []).map((call) => JSON.stringify(call.function ?? call)).join("\n");
      const content = typeof message.content === "string" ? message.content : JSON.stringify(message.content ?? "");
      node.append([content, calls].filter(Boolean).join("\n"));
      return node;
    });
  }
  function sample(rollout, colour) {
    const box = make("article", "sample");
    const facts = make("div", "facts");
    const add = (name, value) => {
      if (value === undefined || value === null || value === "") return;
      const item = make("span", "", `${name} `);
      item.append(make("b", "", short(value)));
      facts.append(item);
    };
    add("step", rollout.step); add("sample", rollout.sample); add("row", rollout.dataset_row);
    add("reward", rollout.score);
    const rewards = Object.entries(rollout.rewards || {});
    if (rewards.length > 1) rewards.forEach(([name, value]) => add(name, value));
    add("advantage", rollout.advantage); add("tokens", rollout.length); add("stop", rollout.ending);
    if (rollout.versions) add("weights of update", rollout.versions[0] === rollout.versions[1] ? rollout.versions[0] : rollout.versions.join(" to "));
    for (const [name, value] of Object.entries(rollout.columns || {})) {
      if (typeof value !== "object" && String(value).length <= 60) add(name, value);
    }
    box.append(facts, ...turnsOf(rollout, colour));
    if (rollout.failure) box.append(make("p", "note", rollout.failure));
    return box;
  }
  const LEGENDS = {
    mask: [["var(--accent)", "sampled by the model"], ["", "prompt, template or environment"]],
    logprobs: [["var(--accent)", "the darker, the less probable the token was"]],
    advantages: [["var(--good)", "above 0: made more probable"], ["var(--bad)", "below 0"]],
    versions: [["var(--accent)", "the darker, the newer the weights that sampled it"]],
  };
  function list(box) {
    const rollouts = JSON.parse(box.querySelector(".rollouts").textContent);
    const part = (name) => box.querySelector("." + name);
    const unique = (values) => [...new Set(values.filter((value) => value !== undefined && value !== null))];
    const fill = (select, values) => values.forEach((value) => select.append(make("option", "", String(value))));
    fill(part("stop"), unique(rollouts.map((one) => one.ending)).sort());
    fill(part("of-step"), unique(rollouts.map((one) => one.step)).sort((a, b) => a - b));
    const hasTokens = rollouts.some((one) => one.token_ids);
    part("colour").closest("label").hidden = !hasTokens;
    let limit = PAGE;
    const show = () => {
      const low = part("low").value === "" ? -Infinity : Number(part("low").value);
      const high = part("high").value === "" ? Infinity : Number(part("high").value);
      const words = part("words").value.toLowerCase();
      let found = rollouts.filter((one) =>
        (part("low").value === "" && part("high").value === "" || (one.score !== null && one.score !== undefined && one.score >= low && one.score <= high))
        && (part("stop").value === "" || one.ending === part("stop").value)
        && (part("of-step").value === "" || String(one.step) === part("of-step").value)
        && (words === "" || (one.words ??= JSON.stringify([one.prompt, one.completion, one.messages]).toLowerCase()).includes(words)));
      const by = { low: (one) => one.score ?? Infinity, high: (one) => -(one.score ?? -Infinity), long: (one) => -(one.length ?? 0) }[part("order").value];
      if (by) found = [...found].sort((a, b) => by(a) - by(b));
      part("count").textContent = `${found.length.toLocaleString("en")} of ${rollouts.length.toLocaleString("en")} rollouts in this page match.`;
      part("list").replaceChildren(...found.slice(0, limit).map((one) => sample(one, part("colour").value)));
      part("more").hidden = found.length <= limit;
      part("legend").replaceChildren(...(hasTokens ? LEGENDS[part("colour").value] : []).map(([colour, text]) => {
        const item = make("span", "");
        const swatch = make("span", "swatch");
        swatch.style.background = colour ? `color-mix(in srgb, ${colour} 45%, transparent)` : "none";
        swatch.style.border = "1px solid var(--line)";
        item.append(swatch, text);
        return item;
      }));
    };
    all("input, select", box).forEach((node) => { node.oninput = () => { limit = PAGE; show(); }; });
    part("more").onclick = () => { limit += PAGE; show(); };
    show();
  }
  for (const box of all(".samples")) {
    box.drawNow = () => list(box);
    inView.observe(box);
  }

  // A page of a run that goes on loads itself again, and stays where it was

  const dark = matchMedia("(prefers-color-scheme: dark)");
  setTheme(recall("theme") ?? (dark.matches ? "dark" : "light"));
  dark.onchange = () => setTheme(dark.matches ? "dark" : "light");
  if (document.body.dataset.refresh) {
    const pause = document.getElementById("pause");
    const set = (is) => { pause.setAttribute("aria-pressed", is); pause.textContent = is ? "Go on" : "Pause"; remember("paused", is); };
    set(recall("paused") === "true");
    pause.onclick = () => set(pause.getAttribute("aria-pressed") !== "true");
    setInterval(() => {
      const isTyping = ["INPUT", "SELECT"].includes((document.activeElement || {}).tagName);
      if (pause.getAttribute("aria-pressed") === "true" || isTyping) return;
      remember("scroll", String(scrollY));
      location.reload();
    }, 1000 * Number(document.body.dataset.refresh));
    const place = recall("scroll");
    if (place) { root.style.scrollBehavior = "auto"; scrollTo(0, Number(place)); }
  }
})();
