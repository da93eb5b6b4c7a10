// Draws what the kernel tells of a group: lanes with bars, offsets, buttons, and a slider for the past.
// The kernel sends whole lanes when they changed; where a bar stands on the page is worked out here.
const NS = "http://www.w3.org/2000/svg";
const LANE = 24, BAR = 18, LABEL = 110, TOP = 22, FOOT = 20, SECONDS = 60;
const HUES = ["#0072b2", "#00795a", "#9c4f86", "#56698f"];
const SIGNS = { joined: "+", gone: "−", left: "−", stopped: "−", killed: "✕", died: "✕", failed: "✕", frozen: "‖", thawed: "▶" };
const FAULTS = ["killed", "died", "failed", "frozen"];

function html(tag, options = {}, parent) {
  const { text, ...rest } = options, made = document.createElement(tag);
  for (const [key, value] of Object.entries(rest)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}
function shape(tag, attributes, parent) {
  const made = document.createElementNS(NS, tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (parent) parent.append(made);
  return made;
}
const fit = (words, width) => (width < 26 ? "" : words.length * 6.4 < width ? words : words.slice(0, Math.floor(width / 6.4) - 1) + "…");

class Section { // one group
  constructor(name, root, act) {
    this.name = name; this.lanes = new Map(); this.offsets = new Map(); this.marks = []; this.members = []; this.guess = {};
    this.box = html("section", { class: "lk-group", "aria-label": `group ${name}` }, root);
    html("h4", { text: `group ${name}` }, this.box);
    html("p", { class: "lk-hint", text: "A bar is an owner's time; a dashed gap is time without one; a pale bar is an owner that is silent." }, this.box);
    this.scroll = html("div", { class: "lk-scroll", tabindex: "0", role: "group", "aria-label": `partitions of ${name}` }, this.box);
    this.svg = shape("svg", { role: "img", class: "lk-lanes" }, this.scroll);
    this.back = shape("g", {}, this.svg); this.front = shape("g", {}, this.svg);
    this.said = html("p", { class: "lk-said", "aria-live": "off" }, this.box);
    this.act = act;
  }
  take(told) {
    if (told.members) this.members = told.members;
    if (told.marks) this.marks = told.marks;
    if (told.guess) this.guess = told.guess;
    if (told.summary) { this.said.textContent = told.summary; this.svg.setAttribute("aria-label", told.summary); }
    for (const [id, bars] of Object.entries(told.lanes || {})) this.lane(id).bars = bars;
    for (const [id, offsets] of Object.entries(told.offsets || {})) this.lane(id).offsets = offsets;
    for (const id of told.gone || []) { this.lanes.get(id)?.g.remove(); this.lanes.delete(id); this.order = null; }
  }
  lane(id) {
    let lane = this.lanes.get(id);
    if (!lane) {
      lane = { id, bars: [], offsets: null, drawn: [], g: shape("g", { "data-lane": id }, this.front) };
      lane.label = shape("text", { class: "lk-label", x: LABEL - 8, y: 13, "text-anchor": "end" }, lane.g);
      lane.label.textContent = id.length > 16 ? id.slice(0, 9) + "…" + id.slice(-6) : id;
      lane.lag = shape("text", { class: "lk-lag", y: 13, "text-anchor": "end" }, lane.g);
      lane.track = shape("rect", { class: "lk-track", y: BAR + 1, height: 3 }, lane.g);
      lane.done = shape("rect", { class: "lk-done", y: BAR + 1, height: 3 }, lane.g);
      this.lanes.set(id, lane); this.order = null;
    }
    return lane;
  }
  draw(begin, now) {
    const width = Math.max(this.box.clientWidth || 600, 320), right = width < 500 ? 58 : 92, room = width - LABEL - right;
    const span = Math.max(now - begin, 1000), x = (at) => LABEL + (room * Math.min(Math.max(at - begin, 0), span)) / span;
    if (!this.order) {
      const parts = (id) => [id.replace(/-\d+$/, ""), Number(id.match(/\d+$/))];
      this.order = [...this.lanes.values()].sort((a, b) => { const [s, n] = parts(a.id), [t, m] = parts(b.id); return s < t ? -1 : s > t ? 1 : n - m; });
      this.order.forEach((lane, i) => lane.g.setAttribute("transform", `translate(0 ${TOP + i * LANE})`));
    }
    const height = TOP + this.order.length * LANE + FOOT;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`); this.svg.setAttribute("width", width); this.svg.setAttribute("height", height);
    const seen = this.order.length > 60 ? [this.scroll.scrollTop - 200, this.scroll.scrollTop + this.scroll.clientHeight + 200] : [-1, Infinity];
    const top = Math.max(1, ...this.order.map((lane) => lane.offsets?.[3] ?? 0));
    this.order.forEach((lane, i) => {
      const y = TOP + i * LANE;
      if (y < seen[0] || y > seen[1]) return; // out of sight: drawn when scrolled to
      const bars = lane.bars.filter(([since, until]) => since <= now && (until === null || until > begin));
      while (lane.drawn.length > bars.length) lane.drawn.pop().remove();
      bars.forEach(([since, until, member, state], k) => {
        let g = lane.drawn[k];
        if (!g) { g = lane.drawn[k] = shape("g", {}, lane.g); shape("rect", { height: BAR, rx: 3, y: 0 }, g); shape("text", { y: 13 }, g); shape("title", {}, g); }
        const end = until === null || until > now ? now : until, left = x(since), wide = Math.max(x(end) - left, 1);
        const [rect, text, title] = g.children, hue = HUES[Math.max(this.members.indexOf(member), 0) % HUES.length];
        rect.setAttribute("class", `lk-bar lk-${state}`); rect.setAttribute("x", left); rect.setAttribute("width", wide);
        rect.style.fill = state === "owned" || state === "silent" ? hue : ""; rect.style.stroke = state === "silent" ? hue : "";
        Object.assign(rect.dataset, { since, until: until === null ? "" : until, member: member || "", state });
        const cost = `${((end - since) / 1000).toFixed(1)} s`;
        const words = state === "owned" ? member : state === "silent" ? `${member} is silent, ${cost}` : state === "unowned" ? `nobody, ${cost}` : `unknown, ${cost}`;
        text.setAttribute("x", left + 4); text.setAttribute("class", `lk-in-${state}`); text.textContent = fit(words, wide - 6);
        title.textContent = `${lane.id}: ${words}`;
      });
      const [start, committed, position, end] = lane.offsets || [null, null, null, null];
      const scale = (n) => (room * (n ?? 0)) / top;
      for (const rect of [lane.track, lane.done]) rect.setAttribute("x", LABEL + scale(start));
      lane.track.setAttribute("width", Math.max(scale(end) - scale(start), 0)); lane.done.setAttribute("width", Math.max(scale(committed) - scale(start), 0));
      const guess = this.guess[lane.id];
      lane.lag.setAttribute("x", width - 2);
      lane.lag.textContent = guess ? `guess: ${guess}` : end === null ? "" : committed === null ? "no commit" : `lag ${Math.max(end - committed, 0)}`;
      if (guess) { const open = bars.find((bar) => bar[1] === null); lane.lag.setAttribute("class", open && open[2] === guess ? "lk-lag lk-right" : "lk-lag lk-wrong"); lane.lag.textContent += open && open[2] === guess ? " ✓" : " ✗"; }
      else lane.lag.setAttribute("class", "lk-lag");
    });
    this.back.replaceChildren();
    let free = 0;
    for (const [at, kind, about] of this.marks) {
      if (at < begin || at > now) continue;
      const place = x(at), sign = SIGNS[kind];
      shape("path", { class: FAULTS.includes(kind) ? "lk-at lk-fault" : "lk-at", d: `M${place} ${TOP - 4}V${height - FOOT}` }, this.back);
      if (!sign || place < free) continue;
      const words = sign + about.split("-").pop(), text = shape("text", { x: place, y: TOP - 8, class: "lk-sign" }, this.back);
      text.textContent = words; shape("title", {}, text).textContent = `${about} ${kind}`; free = place + 8 * words.length;
    }
    for (const [place, words, anchor] of [[LABEL, `${Math.round(span / 1000)} s before`, "start"], [LABEL + room, new Date(now).toLocaleTimeString(), "end"]])
      shape("text", { x: place, y: height - 5, class: "lk-label", "text-anchor": anchor }, this.back).textContent = words;
  }
}

function controls(root, model, told) { // buttons that break things
  const bar = html("div", { class: "lk-buttons", role: "toolbar", "aria-label": `what to do to group ${told.group}` }, root);
  const choice = (label) => { const box = html("label", { text: `${label} ` }, bar); return html("select", { "aria-label": label }, box); };
  const member = choice("member");
  const press = (words, message) => { const b = html("button", { type: "button", text: words }, bar); b.addEventListener("click", () => { said.textContent = `${words} …`; model.send({ do: words, ...message() }); }); };
  for (const verb of ["kill", "freeze", "thaw", "stop"]) press(`${verb} member`, () => ({ member: member.value }));
  press("add member", () => ({}));
  const broker = choice("broker");
  for (const verb of ["kill", "restart"]) press(`${verb} broker`, () => ({ broker: Number(broker.value) }));
  const by = html("input", { type: "number", value: "-10", "aria-label": "reset by how many records" }, html("label", { text: "reset by " }, bar));
  press("reset group", () => ({ by: Number(by.value) }));
  const said = html("p", { class: "lk-said", role: "status" }, root);
  const fill = (select, values) => {
    const have = [...select.options].map((option) => option.value).join();
    if (have === values.join()) return;
    const chosen = select.value; select.replaceChildren(...values.map((value) => html("option", { text: value, value })));
    if (values.includes(chosen)) select.value = chosen;
  };
  return (now) => { if (now.people) fill(member, now.people); if (now.brokers) fill(broker, now.brokers.map(String)); if (now.said) said.textContent = now.said; };
}

function player(root, redraw, first, last, marks) { // the past: play, step, slide
  const bar = html("div", { class: "lk-buttons", role: "toolbar", "aria-label": "playback" }, root);
  const play = html("button", { type: "button", text: "play" }, bar);
  const back = html("button", { type: "button", text: "step back" }, bar), on = html("button", { type: "button", text: "step on" }, bar);
  const box = html("div", { class: "lk-slide" }, root);
  const slide = html("input", { type: "range", min: first, max: last, step: 100, value: last, "aria-label": "moment of the run" }, box);
  const ticks = html("div", { class: "lk-ticks", "aria-hidden": "true" }, box);
  for (const [at, kind, about] of marks) if (SIGNS[kind]) html("span", { text: SIGNS[kind], title: `${about} ${kind}`, style: `left:${(100 * (at - first)) / Math.max(last - first, 1)}%` }, ticks);
  const moments = [...new Set(marks.map((mark) => mark[0]))].sort((a, b) => a - b);
  let timer = null;
  const show = () => { slide.setAttribute("aria-valuetext", new Date(Number(slide.value)).toLocaleTimeString()); redraw(Number(slide.value)); };
  const stop = () => { clearInterval(timer); timer = null; play.textContent = "play"; };
  const jump = (to) => { stop(); if (to !== undefined) slide.value = to; show(); };
  play.addEventListener("click", () => {
    if (timer) return stop();
    if (Number(slide.value) >= last) slide.value = first;
    play.textContent = "pause";
    timer = setInterval(() => { slide.value = Number(slide.value) + 100; show(); if (Number(slide.value) >= last) stop(); }, 100);
  });
  back.addEventListener("click", () => jump(moments.filter((at) => at < Number(slide.value) - 99).pop() ?? first));
  on.addEventListener("click", () => jump(moments.find((at) => at > Number(slide.value)) ?? last));
  slide.addEventListener("input", () => { stop(); show(); });
  return stop;
}

function render({ model, el }) {
  el.classList.add("lk-live");
  const sections = new Map();
  let buttons = null, now = 0, first = 0, stop = () => {}, chosen = null, spent = 0;
  const draw = () => {
    const begun = performance.now(), at = chosen ?? now;
    for (const section of sections.values()) section.draw(chosen === null && !first ? at - SECONDS * 1000 : Math.max(first, at - SECONDS * 1000), at);
    spent = performance.now() - begun; el.dataset.spent = spent.toFixed(2);
  };
  const take = (told) => {
    if (told.whole) { el.replaceChildren(); sections.clear(); buttons = null; stop(); chosen = null; }
    if (told.whole && told.group && told.controls) buttons = controls(el, model, told);
    for (const [name, part] of Object.entries(told.groups || {})) {
      if (!sections.has(name)) { const section = new Section(name, el); section.scroll.addEventListener("scroll", draw); sections.set(name, section); }
      sections.get(name).take(part);
    }
    now = told.now || now; buttons?.(told); el.dataset.revision = told.revision;
    if (told.whole && told.first) { first = told.first; stop = player(el, (at) => { chosen = at; draw(); }, told.first, told.now, told.marks || []); chosen = told.now; }
    draw();
  };
  model.on("msg:custom", take);
  const resized = new ResizeObserver(draw); resized.observe(el);
  model.send({ do: "hello" }); // a page that was opened, or opened again, asks for all
  return () => { stop(); resized.disconnect(); model.off("msg:custom", take); };
}
export default { render };
