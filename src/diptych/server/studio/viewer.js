// One finished clip: playback with sound, how it was made, and what to do with it next.

import { blobUrl } from "./api.js";
import { make } from "./cards.js";
import { duration } from "./cost.js";

const $ = (id) => document.getElementById(id);

let shown = null;

export async function open(job, actions) {
  const dialog = $("viewer");
  const mine = {};
  shown = mine;
  $("screen").replaceChildren();
  $("viewer-prompt").textContent = job.prompt;
  const facts = {
    Size: job.size.replace("x", " × "),
    Length: `${job.duration_s.toFixed(2)} s, ${job.num_frames} frames at ${job.fps}`,
    Steps: job.num_inference_steps,
    Guidance: job.guidance_scale > 1 ? job.guidance_scale : "off",
    Seed: job.seed,
    Took: job.inference_time_s ? duration(job.inference_time_s) : "unknown",
    Id: job.id,
  };
  if (job.warnings.length) facts.Notes = job.warnings.join("; ").replaceAll("_", " ");
  $("facts").replaceChildren(
    ...Object.entries(facts).map(([name, value]) => make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: value }))),
  );
  const button = (text, act, danger = false) => {
    const made = make("button", { class: danger ? "quiet danger" : "quiet", type: "button", textContent: text });
    made.addEventListener("click", () => {
      dialog.close();
      act(job);
    });
    return made;
  };
  const save = make("a", { class: "quiet", download: `${job.id}.mp4`, textContent: "Download", href: "#" });
  $("viewer-actions").replaceChildren(save, button("Run again", actions.again), button("Edit", actions.edit), button("Delete", actions.remove, true));
  $("wave").hidden = true;
  dialog.showModal();
  for (let output = 0; output < job.num_outputs; output += 1) {
    const url = await blobUrl(job.id, output);
    if (shown !== mine) return; // closed, or another one opened, while this was fetched
    if (output === 0) save.href = url;
    $("screen").append(make("video", { src: url, controls: true, loop: true, autoplay: output === 0, playsInline: true }));
  }
  if (job.has_audio) {
    const url = await blobUrl(job.id, "waveform");
    if (shown !== mine) return;
    $("wave").src = url;
    $("wave").hidden = false;
  }
}

export function start() {
  const dialog = $("viewer");
  dialog.addEventListener("close", () => {
    shown = null;
    $("screen").replaceChildren();
  });
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
}
