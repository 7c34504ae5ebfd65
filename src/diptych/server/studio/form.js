// The form: what is asked for, what it costs, and how a refusal is shown.

import { Refused, post } from "./api.js";
import { duration, tokens, work } from "./cost.js";

const $ = (id) => document.getElementById(id);
const FIELDS = {
  size: "width", width: "width", height: "height", num_frames: "frames", seconds: "frames", fps: "fps", seed: "seed",
  num_inference_steps: "steps", guidance_scale: "guidance", negative_prompt: "negative", prompt: "prompt",
  input_reference: "image", n: "outputs", sample_audio: "sound", reference_fit: "fit",
};

let model = null;
let image = null;
let source = null;
let known = { pace: null };

/** Make the form fit the model: its defaults, its limits, the shapes of its own area. */
export function setModel(found) {
  if (model) return;
  model = found.diptych;
  const d = model.defaults;
  if (d.width === undefined) {
    model = null;
    return;
  }
  drawShapes(d);
  if (d.example) $("prompt").placeholder = d.example;
  $("steps").max = model.limits.max_steps;
  $("outputs").max = model.limits.max_outputs;
  $("guidance-row").hidden = $("negative-row").hidden = d.distilled;
  $("drop").hidden = !d.has_image;
  $("sound").disabled = !d.has_audio;
  reset();
}

function drawShapes(d) {
  const area = d.width * d.height;
  const sized = (ratio) => [Math.sqrt(area * ratio), Math.sqrt(area / ratio)].map((v) => Math.max(64, Math.floor(v / 16) * 16));
  const wide = [d.width, d.height];
  const shapes = [["Wide", wide], ["4 : 3", sized(4 / 3)], ["Square", sized(1)], ["Tall", [...wide].reverse()], ["Other", null]];
  $("shapes").replaceChildren(
    ...shapes.map(([name, sides], index) => {
      const label = document.createElement("label");
      const input = Object.assign(document.createElement("input"), { type: "radio", name: "shape", value: sides?.join("x") ?? "" });
      input.checked = index === 0;
      const text = document.createElement("span");
      const icon = document.createElement("i");
      if (sides) {
        const scale = 26 / Math.max(...sides);
        icon.style.setProperty("--w", `${sides[0] * scale}px`);
        icon.style.setProperty("--h", `${sides[1] * scale}px`);
        label.title = `${sides[0]} × ${sides[1]} pixels`;
      }
      text.append(icon, name);
      label.append(input, text);
      return label;
    }),
  );
}

export function reset() {
  const d = model.defaults;
  $("frames").value = d.frames;
  $("steps").value = d.steps;
  $("guidance").value = d.guidance;
  $("fps").value = d.fps;
  $("width").value = d.width;
  $("height").value = d.height;
  $("sound").checked = d.has_audio;
  update();
}

function chosenShape() {
  return document.querySelector('input[name="shape"]:checked')?.value ?? "";
}

/** The request as the form shows it. */
export function read() {
  const shape = chosenShape();
  const [width, height] = shape ? shape.split("x").map(Number) : [Number($("width").value), Number($("height").value)];
  return {
    width,
    height,
    frames: Number($("frames").value),
    fps: Number($("fps").value) || model.defaults.fps,
    steps: Number($("steps").value),
    guidance: model.defaults.distilled ? 1 : Number($("guidance").value),
    outputs: Number($("outputs").value) || 1,
  };
}

export function update(more = {}) {
  if (!model) return;
  known = { ...known, ...more };
  const request = read();
  $("custom").hidden = chosenShape() !== "";
  $("frames-text").value = `${(request.frames / request.fps).toFixed(1)} s · ${request.frames} frames`;
  $("steps-text").value = request.steps;
  $("guidance-text").value = request.guidance > 1 ? request.guidance : "off";
  const d = model.defaults;
  const usual = work({ ...d, frames: d.frames, steps: d.steps, guidance: d.guidance });
  const share = work(request) / usual;
  $("cost-time").textContent = known.pace ? took(work(request) * known.pace) : "Cost";
  $("cost-share").textContent = share > 0.95 && share < 1.05 ? "the default clip" : `${share < 10 ? share.toFixed(share < 1 ? 2 : 1) : Math.round(share)} × the default clip`;
  $("cost-meter").value = Math.min(1, Math.log2(1 + share) / 4);
  const many = tokens(request) > model.limits.max_video_tokens;
  $("cost-why").textContent = many
    ? `${Math.round(tokens(request)).toLocaleString()} video tokens are more than the ${model.limits.max_video_tokens.toLocaleString()} this server allows.`
    : `${request.width} × ${request.height}, ${Math.round(tokens(request)).toLocaleString()} video tokens, ${request.steps} steps${request.guidance > 1 ? " twice, for guidance" : ""}`;
}

const took = (seconds) => (seconds < 1 ? "under a second" : `about ${duration(seconds)}`);

export function setImage(file) {
  image = file;
  $("picture").hidden = $("no-image").hidden = !file;
  if (file) {
    const url = URL.createObjectURL(file);
    $("picture").src = url;
    $("drop-text").textContent = file.name || "pasted image";
  } else {
    $("drop-text").textContent = "Drop, paste or choose an image (optional)";
    $("image").value = "";
  }
}

/** Fill the form from an earlier clip; a completed one lends its image and everything the form does not show. */
export function fill(job) {
  const [width, height] = job.size.split("x");
  $("prompt").value = job.prompt;
  const shape = [...document.querySelectorAll('input[name="shape"]')].find((i) => i.value === job.size || i.value === "");
  shape.checked = true;
  $("width").value = width;
  $("height").value = height;
  $("frames").value = job.num_frames;
  $("fps").value = job.fps;
  $("steps").value = job.num_inference_steps;
  $("guidance").value = job.guidance_scale;
  $("seed").value = job.seed;
  $("sound").checked = job.has_audio;
  $("outputs").value = job.num_outputs;
  setImage(null);
  setSource(job.status === "completed" ? job.id : null);
  update();
  $("prompt").focus();
  $("compose").scrollIntoView({ block: "start" });
}

function setSource(id) {
  source = id;
  $("based").hidden = !id;
  $("drop").hidden = Boolean(id) || !model.defaults.has_image;
}

async function submit() {
  show(null);
  const request = read();
  const body = {
    prompt: $("prompt").value.trim(),
    size: `${request.width}x${request.height}`,
    num_frames: request.frames,
    fps: request.fps,
    num_inference_steps: request.steps,
    sample_audio: $("sound").checked,
    n: request.outputs,
    reference_fit: $("fit").value,
  };
  if (!model.defaults.distilled) body.guidance_scale = request.guidance;
  if ($("negative").value.trim() && !model.defaults.distilled) body.negative_prompt = $("negative").value.trim();
  if ($("seed").value.trim()) body.seed = $("seed").value.trim();
  if (!source && image) {
    const form = new FormData();
    for (const [name, value] of Object.entries(body)) form.set(name, value);
    form.set("input_reference", image);
    return post("v1/videos", form);
  }
  return post(source ? `v1/videos/${source}/remix` : "v1/videos", body);
}

/** Show a refusal beside the button and mark the field it names; `null` clears it. */
export function show(error) {
  document.querySelectorAll("[aria-invalid]").forEach((field) => field.removeAttribute("aria-invalid"));
  $("problem").hidden = !error;
  if (!error) return;
  $("problem").textContent = error instanceof Refused ? error.message : "The server cannot be reached.";
  const field = $(FIELDS[error.param]);
  if (field) {
    field.setAttribute("aria-invalid", "true");
    field.closest("details")?.setAttribute("open", "");
    field.focus();
  }
}

export function start(onMade) {
  $("compose").addEventListener("input", () => update());
  $("compose").addEventListener("submit", async (event) => {
    event.preventDefault();
    $("go").disabled = true;
    try {
      onMade(await submit());
    } catch (error) {
      show(error);
    } finally {
      $("go").disabled = false;
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !document.querySelector("dialog[open]")) {
      event.preventDefault();
      $("compose").requestSubmit();
    }
  });
  $("image").addEventListener("change", () => setImage($("image").files[0] ?? null));
  $("no-image").addEventListener("click", () => setImage(null));
  $("detach").addEventListener("click", () => setSource(null));
  const drop = $("drop");
  for (const [name, over] of [["dragenter", true], ["dragover", true], ["dragleave", false], ["drop", false]]) {
    drop.addEventListener(name, (event) => {
      event.preventDefault();
      drop.classList.toggle("over", over);
    });
  }
  const take = (files) => {
    const found = [...(files ?? [])].find((file) => file.type.startsWith("image/"));
    if (found && !drop.hidden) setImage(found);
    return found;
  };
  drop.addEventListener("drop", (event) => take(event.dataTransfer.files));
  document.addEventListener("paste", (event) => {
    if (take(event.clipboardData?.files)) event.preventDefault();
  });
}
