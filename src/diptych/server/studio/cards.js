// What is being made, and what was made.

import { blobUrl, cancel, follow, forget, remove } from "./api.js";
import { duration } from "./cost.js";

const $ = (id) => document.getElementById(id);
const STAGES = { text: "reading the text", image: "reading the image", denoise: "step", decode: "decoding", mux: "writing the file" };
const STREAMS = 2; // a browser keeps few connections to one server

const making = new Map();
const shown = new Map();

export function make(tag, props = {}, ...children) {
  const { class: name, ...rest } = props;
  const node = Object.assign(document.createElement(tag), rest);
  if (name) node.className = name;
  node.append(...children);
  return node;
}

/** Bring the queue in line with the jobs that are not over. `changed` is called when one of them ends. */
export function showQueue(jobs, changed) {
  const waiting = jobs.filter((job) => job.status === "queued");
  const active = jobs.filter((job) => job.status === "in_progress" || job.status === "queued");
  active.sort((a, b) => (a.status === b.status ? (a.id < b.id ? -1 : 1) : a.status === "queued" ? 1 : -1));
  for (const [id, card] of making) {
    if (!active.some((job) => job.id === id)) {
      card.stop.abort();
      card.node.remove();
      making.delete(id);
    }
  }
  active.forEach((job) => {
    const card = making.get(job.id) ?? makingCard(job, changed);
    making.set(job.id, card);
    if (!card.live) card.update(job, waiting.filter((other) => other.id < job.id).length);
    if ($("queue").children[active.indexOf(job)] !== card.node) $("queue").insertBefore(card.node, $("queue").children[active.indexOf(job)] ?? null);
    const streams = [...making.values()].filter((other) => other.live).length;
    if (job.status === "in_progress" && !card.live && streams < STREAMS) card.watch();
  });
  $("queue-section").hidden = active.length === 0;
}

function makingCard(job, changed) {
  const [width, height] = job.size.split("x");
  const frame = make("div", { class: "frame" }, "waiting");
  frame.style.setProperty("--aspect", `${width}/${height}`);
  const bar = make("div");
  const track = make("div", { class: "track", role: "progressbar" }, bar);
  track.setAttribute("aria-label", "Progress");
  const left = make("span");
  const right = make("span");
  const button = make("button", { class: "quiet danger", type: "button", textContent: "Cancel" });
  const words = make("p", { class: "words", textContent: job.prompt });
  const node = make("li", { class: "making" }, frame, make("div", {}, words, track, make("div", { class: "note" }, left, right)), button);
  node.classList.toggle("tall", Number(height) > Number(width));
  node.dataset.id = job.id;
  const card = { node, live: false, stop: new AbortController() };
  card.update = (now, ahead = now.queue_position ?? 0) => {
    bar.style.width = `${now.progress}%`;
    track.setAttribute("aria-valuenow", now.progress);
    const queued = now.status === "queued";
    node.classList.toggle("waiting", queued);
    if (!queued && frame.textContent === "waiting") frame.textContent = "starting";
    left.textContent = queued
      ? ahead ? `${ahead} ahead` : "next"
      : now.stage === "denoise" ? `step ${now.step} of ${now.total_steps}` : (STAGES[now.stage] ?? "starting");
    right.textContent = now.eta_s > 0.5 ? `${duration(now.eta_s)} left` : queued ? "" : `${now.progress} %`;
  };
  card.watch = async () => {
    card.live = true;
    try {
      await follow(job.id, (name, data) => {
        if (name === "preview") {
          const picture = frame.querySelector("img") ?? make("img", { alt: "How the clip looks so far" });
          picture.src = data.image;
          if (!picture.isConnected) frame.replaceChildren(picture);
        } else if (name === "progress" || name === "snapshot") card.update(data);
        else changed();
      }, card.stop.signal);
    } catch {
      // The list is read again soon, whatever ended the stream.
    }
    card.live = false;
  };
  button.addEventListener("click", async () => {
    button.disabled = true;
    button.textContent = "Stopping";
    await cancel(job.id).catch(() => {});
    changed();
  });
  return card;
}

/** Bring the gallery in line with the jobs that are over. */
export function showGallery(jobs, actions) {
  const over = jobs.filter((job) => job.status === "completed" || job.status === "failed");
  for (const [id, node] of shown) {
    if (!over.some((job) => job.id === id)) {
      node.remove();
      shown.delete(id);
      forget(id);
    }
  }
  over.forEach((job, index) => {
    if (!shown.has(job.id)) shown.set(job.id, clipCard(job, actions));
    const node = shown.get(job.id);
    if ($("gallery").children[index] !== node) $("gallery").insertBefore(node, $("gallery").children[index] ?? null);
  });
  $("empty").hidden = jobs.length > 0;
}

function clipCard(job, actions) {
  const failed = job.status === "failed";
  const stopped = job.error?.code === "cancelled";
  const frame = make("div", { class: "frame" });
  if (failed) frame.append(make("p", { textContent: job.error.message }));
  else {
    blobUrl(job.id, "thumbnail").then((url) => frame.prepend(make("img", { src: url, alt: "", loading: "lazy" })), () => {});
    const many = job.num_outputs > 1 ? `${job.num_outputs} × ` : "";
    frame.append(make("span", { class: "play", innerHTML: '<svg viewBox="0 0 24 24"><path d="M8 5.500v13l11-6.500z" fill="currentColor"/></svg>' }));
    frame.append(make("span", { class: "badge", textContent: `${many}${job.duration_s.toFixed(1)} s${job.has_audio ? " · sound" : ""}` }));
  }
  const open = make("button", { class: "open", type: "button" }, frame, make("p", { class: "words", textContent: job.prompt }));
  open.addEventListener("click", () => (failed ? actions.edit(job) : actions.open(job)));
  open.setAttribute("aria-label", failed ? `Failed: ${job.prompt}. Edit and try again` : `Play: ${job.prompt}`);
  const again = make("button", { class: "quiet", type: "button", textContent: "Run again", title: "The same request with a new seed" });
  again.addEventListener("click", () => actions.again(job));
  const drop = make("button", { class: "quiet danger", type: "button", textContent: "Delete" });
  drop.addEventListener("click", () => actions.remove(job));
  const facts = make("span", { textContent: `${job.size.replace("x", " × ")} · ${job.num_inference_steps} steps` });
  const node = make("li", { class: "clip" }, open, make("div", { class: "note" }, facts, make("div", {}, again, drop)));
  node.classList.toggle("failed", failed && !stopped);
  node.classList.toggle("stopped", stopped);
  const [width, height] = job.size.split("x").map(Number);
  node.classList.toggle("tall", width / height < 1.2);
  node.dataset.id = job.id;
  return node;
}

export async function removeClip(job) {
  await remove(job.id);
  shown.get(job.id)?.remove();
  shown.delete(job.id);
  forget(job.id);
}
