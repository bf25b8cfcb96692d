"use strict";
/* The trajectory browser and the read-out of the curves. Texts of runs enter the document as text nodes only. */
(() => {
  const PER_PAGE = 8;
  const { runs } = JSON.parse(document.getElementById("data").textContent);

  // ---- small helpers ------------------------------------------------------------------------------------------------

  /** An element with a class and children; strings become text nodes. */
  function make(tag, className, ...children) {
    const element = document.createElement(tag);
    if (className) element.className = className;
    element.append(...children.filter((child) => child !== null && child !== ""));
    return element;
  }

  /** An SVG element with attributes and children. */
  function draw(tag, attributes, ...children) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }

  /** A number with at most three digits that matter. */
  const short = (value) => String(Number(value.toPrecision(3)));

  /** Seconds as m:ss.f or h:mm:ss.f. */
  function clock(seconds) {
    const tenths = Math.round(Math.abs(seconds) * 10);
    const minutes = Math.floor(tenths / 600) % 60;
    const hours = Math.floor(tenths / 36000);
    const rest = ((tenths % 600) / 10).toFixed(1).padStart(4, "0");
    const sign = seconds < 0 && tenths ? "-" : "";
    return sign + (hours ? `${hours}:${String(minutes).padStart(2, "0")}` : minutes) + `:${rest}`;
  }

  const allCalls = (episode) => (episode.turns || []).flatMap((turn) => turn.calls);
  const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

  // ---- filters ------------------------------------------------------------------------------------------------------

  const FILTERS = [
    { key: "step", label: "Step", of: (group) => [group.step], name: String },
    { key: "k", label: "Frames K", of: (group) => (group.k === null ? [] : [group.k]), name: String },
    { key: "verdict", label: "Answer", of: (group, rollout) => [rollout.verdict], name: (value) => value },
    { key: "problem", label: "Failure", of: (group, rollout) => problemsOf(rollout), name: (value) => value },
  ];
  const NONE = "none";
  const state = { step: "", k: "", verdict: "", problem: "", sample: "", text: "" };

  function problemsOf(rollout) {
    return rollout.problems.length ? rollout.problems : [NONE];
  }

  /** Everything of a rollout that can be searched. */
  function searchable(group, rollout) {
    const turns = rollout.turns || [];
    const calls = allCalls(rollout);
    const texts = [group.question, group.sample, group.gold, rollout.failed || "", rollout.answer || ""];
    return texts.concat(turns.map((turn) => turn.text), calls.map((call) => call.reply)).join("\n").toLowerCase();
  }

  function matches(group, rollout) {
    if (state.sample && group.sample !== state.sample) return false;
    for (const filter of FILTERS) {
      if (state[filter.key] && !filter.of(group, rollout).map(String).includes(state[filter.key])) return false;
    }
    return !state.text || searchable(group, rollout).includes(state.text.toLowerCase());
  }

  /** The filters stand in the address, so that a view can be linked to. */
  function readAddress() {
    if (!location.hash.includes("=")) return false;
    const given = new URLSearchParams(location.hash.slice(1));
    for (const key of Object.keys(state)) state[key] = given.get(key) || "";
    return true;
  }

  function writeAddress() {
    const set = Object.entries(state).filter(([, value]) => value);
    const address = set.length ? `#${new URLSearchParams(set)}` : location.href.split("#")[0];
    history.replaceState(null, "", address);
  }

  function choices(filter) {
    const counts = new Map();
    for (const run of runs)
      for (const group of run.groups)
        for (const rollout of group.rollouts)
          for (const value of filter.of(group, rollout)) counts.set(value, (counts.get(value) || 0) + 1);
    const numeric = (value) => typeof value === "number";
    return [...counts].sort(([a], [b]) => (numeric(a) && numeric(b) ? a - b : String(a) < String(b) ? -1 : 1));
  }

  function filterBar(changed) {
    const bar = make("div", "filters");
    for (const filter of FILTERS) {
      const select = make("select", "", new Option("all", ""));
      for (const [value, number] of choices(filter)) select.append(new Option(`${filter.name(value)} (${number})`, value));
      select.value = state[filter.key];
      select.dataset.filter = filter.key;
      select.addEventListener("change", () => changed({ [filter.key]: select.value }));
      bar.append(make("label", "", filter.label, select));
    }
    const search = make("input", "");
    search.type = "search";
    search.placeholder = "question, answer, model text";
    search.value = state.text;
    search.dataset.filter = "text";
    search.addEventListener("input", () => changed({ text: search.value }));
    bar.append(make("label", "grow", "Text", search));
    if (state.sample) bar.append(button("All questions", () => changed({ sample: "" }, true)));
    return bar;
  }

  function button(text, pressed) {
    const element = make("button", "", text);
    element.type = "button";
    element.addEventListener("click", pressed);
    return element;
  }

  // ---- time lines ---------------------------------------------------------------------------------------------------

  /** One video as a line of time: overview frames as ticks, each call's window on a lane of its own, its frames on it. */
  function timeline(video, calls, tall) {
    const length = video.end - video.start;
    if (!(length > 0)) return null;
    const at = (seconds) => `${Math.min(100, Math.max(0, (100 * (seconds - video.start)) / length)).toFixed(2)}%`;
    const lane = tall ? 18 : 7;
    const top = tall ? 20 : 10;
    const height = top + calls.length * lane + (tall ? 18 : 0);
    const label =
      `${video.name}, ${clock(video.start)} to ${clock(video.end)}: ${video.overview.length} overview frames` +
      calls.map(({ number, call }) => `; call ${number}, ${call.status}, ${call.window.map(clock).join(" to ")}`).join("");
    const svg = draw("svg", { class: "time", width: "100%", height, role: "img", "aria-label": label });
    svg.append(draw("rect", { class: "film", x: 0, y: 0, width: "100%", height: top - 4, rx: 2 }));
    for (const time of video.overview) svg.append(draw("line", { class: "seen", x1: at(time), x2: at(time), y1: 1, y2: top - 5 }));
    calls.forEach(({ number, call }, place) => {
      const y = top + place * lane;
      const [start, end] = call.window;
      const width = `${Math.max(0.6, (100 * (end - start)) / length).toFixed(2)}%`;
      svg.append(draw("rect", { class: `window ${call.status}`, x: at(start), y, width, height: lane - 2, rx: 2 }));
      if (!tall) return;
      for (const time of call.frames) svg.append(draw("circle", { class: "seen", cx: at(time), cy: y + lane / 2 - 1, r: 2 }));
      const late = (start + end) / 2 - video.start > length / 2;
      const beside = late ? { x: at(start), dx: -5, class: "tick end" } : { x: at(end), dx: 5, class: "tick" };
      svg.append(draw("text", { ...beside, y: y + 12 }, `${number}`));
    });
    if (tall) {
      svg.append(draw("text", { class: "tick", x: 0, y: height - 4 }, clock(video.start)));
      const about = video.exact ? "" : "about ";
      svg.append(draw("text", { class: "tick end", x: "100%", y: height - 4 }, about + clock(video.end)));
    }
    return svg;
  }

  /** The calls that can be drawn on one video, with their numbers in the episode. */
  function callsOn(episode, index) {
    return allCalls(episode)
      .map((call, place) => ({ call, number: place + 1 }))
      .filter(({ call }) => call.video === index && call.window);
  }

  function timelines(group, episode, tall) {
    const lines = make("div", "lines");
    group.videos.forEach((video, index) => {
      const line = timeline(video, callsOn(episode, index), tall);
      if (line === null) return;
      if (tall && group.videos.length > 1) lines.append(make("small", "", video.name));
      lines.append(line);
    });
    return lines;
  }

  function strip(run, pictures, times) {
    if (!(pictures || []).some((index) => index !== null)) return null;
    const row = make("div", "strip");
    row.tabIndex = 0; // it scrolls, so the keyboard must reach it
    row.setAttribute("role", "group");
    row.setAttribute("aria-label", `${times.length} frames`);
    pictures.forEach((index, place) => {
      if (index === null) return;
      const image = make("img", "");
      image.alt = "";
      image.src = `data:image/jpeg;base64,${run.pictures[index]}`;
      row.append(make("figure", "", image, make("figcaption", "", clock(times[place]))));
    });
    return row;
  }

  // ---- one episode --------------------------------------------------------------------------------------------------

  const TAGS = /(<\/?(?:think|tool_call|tool_code|tool_response|answer)>|<\|[a-z_]+\|>)/;

  /** A model's text with its structural tags set off. */
  function modelText(text, prefix) {
    const block = make("pre", "");
    if (prefix) block.append(make("span", "tag forced", "<think>"), "\n");
    text.split(TAGS).forEach((piece, place) => block.append(place % 2 ? make("span", "tag", piece) : piece));
    return block;
  }

  const REWARDS = [
    ["accuracy", "accuracy"],
    ["format", "format"],
    ["tool", "tool"],
    ["anchor", "anchor, inside format"],
    ["total", "total"],
  ];

  function rewardParts(rewards) {
    if (rewards === null) return make("p", "", "No reward: the episode could not be scored.");
    const list = make("dl", "rewards");
    for (const [key, name] of REWARDS) list.append(make("div", key, make("dt", "", name), make("dd", "", short(rewards[key]))));
    return list;
  }

  function facts(episode) {
    const { sequence, sampled } = episode.tokens;
    const version = episode.policy_version >= 0 ? `weights of version ${episode.policy_version}` : "";
    const tokens = `${sequence} tokens in its sequence, ${sampled} sampled (sub-agents included)`;
    return make("p", "facts", [`${short(episode.seconds)} s`, tokens, version].filter(Boolean).join(" · "));
  }

  function callBlock(run, call, number) {
    const head = make("p", "", make("b", "", `Call ${number}`), " ", make("span", `badge ${call.status}`, call.status.replace("_", " ")));
    const where = call.window ? ` ${call.window.map(clock).join(" to ")}` : "";
    const took = call.latency_s ? ` · ${short(call.latency_s)} s` : "";
    const frames = call.frames.length ? ` · ${count(call.frames.length, "frame")}` : "";
    const tokens = call.subagent_tokens ? ` · sub-agent ${call.subagent_tokens} tokens` : "";
    head.append(where + took + frames + tokens);
    const raw = make("details", "raw", make("summary", "", "as the model wrote it"), make("pre", "", call.raw));
    const reply = make("pre", "reply", call.reply);
    return make("div", `call ${call.status}`, head, strip(run, call.pictures, call.frames), reply, raw);
  }

  function turnBlocks(run, episode) {
    let number = 0;
    return episode.turns.map((turn, place) => {
      const notes = [count(turn.tokens, "token"), `${short(turn.seconds)} s`];
      if (turn.finish_reason === "length") notes.push("cut at the token limit");
      if (turn.forced) notes.push("an answer was demanded");
      const head = make("h5", "", `Turn ${place + 1} `, make("small", "", notes.join(" · ")));
      const calls = turn.calls.map((call) => callBlock(run, call, ++number));
      return make("section", "turn", head, modelText(turn.text, episode.think_prefix), ...calls);
    });
  }

  function episodeBody(run, group, episode) {
    if (episode.failed !== undefined) return make("div", "body", make("pre", "", episode.failed));
    const body = make("div", "body", rewardParts(episode.rewards), facts(episode), timelines(group, episode, true));
    body.append(...turnBlocks(run, episode));
    return body;
  }

  function episodeRow(run, group, episode) {
    const failed = episode.failed !== undefined;
    const answer = failed ? episode.failed : (episode.answer ?? "no answer");
    const head = make("summary", "", make("span", `badge ${episode.verdict.replace(" ", "-")}`, episode.verdict));
    head.append(make("span", failed ? "answer reason" : "answer", answer));
    if (!failed) {
      const calls = allCalls(episode).length;
      const total = episode.rewards === null ? "–" : short(episode.rewards.total);
      head.append(make("span", "sums", `${count(calls, "call")} · reward ${total}`), timelines(group, episode, false));
    }
    if (!failed && episode.problems.length) head.append(make("span", "problems", episode.problems.join(", ")));
    const row = make("details", "episode", head);
    row.addEventListener("toggle", () => {
      if (row.open && row.children.length === 1) row.append(episodeBody(run, group, episode));
    });
    return row;
  }

  // ---- groups and runs ----------------------------------------------------------------------------------------------

  function groupCard(run, group, rollouts, changed) {
    const kinds = { mcq: "multiple choice", tvg: "temporal grounding", oe: "open-ended" };
    const about = [`step ${group.step}`, group.k === null ? "" : `K = ${group.k}`, kinds[group.type]].filter(Boolean);
    const hidden = group.rollouts.length - rollouts.length;
    const card = make("article", "group", make("p", "about", about.join(" · ")), make("h4", "", group.question));
    card.append(make("p", "gold", "Right answer: ", make("b", "", group.gold)));
    for (const video of group.videos) card.append(strip(run, video.pictures, video.overview) || "");
    card.append(...rollouts.map((rollout) => episodeRow(run, group, rollout)));
    const foot = make("p", "foot", hidden ? `${hidden} of ${group.rollouts.length} do not match. ` : "");
    if (!state.sample) foot.append(button("Only this question", () => changed({ sample: group.sample }, true)));
    card.append(foot);
    return card;
  }

  function runColumn(run, changed) {
    const column = make("div", "column");
    const found = run.groups
      .map((group) => ({ group, rollouts: group.rollouts.filter((rollout) => matches(group, rollout)) }))
      .filter(({ rollouts }) => rollouts.length);
    const total = run.groups.reduce((sum, group) => sum + group.rollouts.length, 0);
    const shown = found.reduce((sum, { rollouts }) => sum + rollouts.length, 0);
    const name = runs.length > 1 ? make("b", "", make("i", `key ${run.css}`), run.name) : null;
    column.append(make("p", "found", name, ` ${shown} of ${total} trajectories`));
    if (!total) column.append(make("p", "", "There are no trajectories in this run directory."));
    let next = 0;
    const more = button("Show more", showMore);
    function showMore() {
      for (const { group, rollouts } of found.slice(next, next + PER_PAGE)) more.before(groupCard(run, group, rollouts, changed));
      next += PER_PAGE;
      more.hidden = next >= found.length;
    }
    column.append(more);
    showMore();
    return column;
  }

  function browser() {
    const place = document.getElementById("browser");
    const columns = make("div", "columns");
    let bar = make("div");
    const fill = () => columns.replaceChildren(...runs.map((run) => runColumn(run, changed)));
    const rebuild = () => {
      const fresh = filterBar(changed);
      bar.replaceWith(fresh);
      bar = fresh;
      fill();
    };
    function changed(values, rebuildBar = false) {
      Object.assign(state, values);
      writeAddress();
      if (rebuildBar) rebuild();
      else fill();
    }
    readAddress();
    place.append(bar, columns);
    rebuild();
    window.addEventListener("hashchange", () => readAddress() && rebuild());
  }

  // ---- curves -------------------------------------------------------------------------------------------------------

  /** Shows above a drawing what its curves are at the step under the pointer. */
  function readOut(figure) {
    const svg = figure.querySelector("svg");
    const output = figure.querySelector("output");
    const lines = [...svg.querySelectorAll("polyline[data-label]")].map((line) => ({
      css: line.classList[1],
      points: line.getAttribute("points").split(" ").map((pair) => pair.split(",").map(Number)),
    }));
    if (!output || !lines.length) return;
    const usual = [...output.childNodes];
    const [low, high] = svg.dataset.values.split(" ").map(Number);
    const [first, last] = svg.dataset.steps.split(" ").map(Number);
    const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
    const [left, right, top, bottom] = svg.dataset.margins.split(" ").map(Number);
    const cursor = draw("line", { class: "cursor", y1: top, y2: height - bottom });
    const stepAt = (x) => first + ((last - first) * (x - left)) / (width - left - right);
    const valueAt = (y) => high - ((high - low) * (y - top)) / (height - top - bottom);
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) * width) / box.width;
      const near = lines.map(({ css, points }) => ({
        css,
        point: points.reduce((best, point) => (Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best)),
      }));
      const at = near[0].point[0];
      cursor.setAttribute("x1", at);
      cursor.setAttribute("x2", at);
      svg.append(cursor);
      const values = near.map(({ css, point }) => make("b", `value ${css}`, short(valueAt(point[1]))));
      output.replaceChildren(make("small", "", `step ${Math.round(stepAt(at))}`), ...values);
    });
    svg.addEventListener("pointerleave", () => {
      cursor.remove();
      output.replaceChildren(...usual);
    });
  }

  browser();
  document.querySelectorAll("figure.chart").forEach(readOut);
})();
