// The page's life: read the list, show it, again and again; act on what is pressed.

import { Refused, get, onKeyNeeded, post, setKey } from "./api.js";
import { removeClip, showGallery, showQueue } from "./cards.js";
import { pace } from "./cost.js";
import * as form from "./form.js";
import * as viewer from "./viewer.js";

const $ = (id) => document.getElementById(id);
const PAGE = 30;
const EVERY = 2000;

let pages = 1;
let soon = null;
let busy = false;

const actions = {
  open: (job) => viewer.open(job, actions),
  edit: (job) => form.fill(job),
  async again(job) {
    try {
      const { width, height } = { width: job.size.split("x")[0], height: job.size.split("x")[1] };
      if (job.status === "completed") {
        await post(`v1/videos/${job.id}/remix`, { prompt: job.prompt, seed: Math.floor(Math.random() * 2 ** 32) });
      } else if (job.task === "i2va") {
        form.fill(job);
        form.show(new Refused(0, { message: "Choose the image again: a clip that failed does not lend it.", param: "input_reference" }));
        return;
      } else {
        await post("v1/videos", {
          prompt: job.prompt, width, height, num_frames: job.num_frames, fps: job.fps, n: job.num_outputs,
          num_inference_steps: job.num_inference_steps, guidance_scale: job.guidance_scale, sample_audio: job.has_audio,
        });
      }
      form.show(null);
      refresh();
    } catch (error) {
      form.show(error);
    }
  },
  async remove(job) {
    await removeClip(job).catch(form.show);
    refresh();
  },
};

async function readJobs() {
  const jobs = [];
  let after = "";
  for (let page = 0; page < pages; page += 1) {
    const answer = await get(`v1/videos?limit=${PAGE}${after}`);
    jobs.push(...answer.data);
    $("more").hidden = !answer.has_more;
    if (!answer.has_more) break;
    after = `&after=${answer.last_id}`;
  }
  return jobs;
}

async function refresh() {
  if (busy) {
    soon = true;
    return;
  }
  busy = true;
  try {
    const jobs = await readJobs();
    showQueue(jobs, refresh);
    showGallery(jobs, actions);
    form.update({ pace: pace(jobs) });
    await showStatus(jobs);
  } catch (error) {
    setStatus("down", error instanceof Refused ? error.message : "the server does not answer");
  }
  busy = false;
  if (soon === true) {
    soon = null;
    refresh();
  }
}

async function showStatus(jobs) {
  const models = await get("v1/models");
  form.setModel(models.data[0]);
  const health = await fetch("readyz").then((answer) => answer.json());
  const name = models.data[0].id;
  const working = jobs.some((job) => job.status === "in_progress");
  if (health.status === "ok") setStatus(working ? "busy" : "ready", working ? `${name} is working` : `${name} is ready`);
  else setStatus("down", health.reason);
}

function setStatus(state, text) {
  $("status").dataset.state = state;
  $("status").querySelector(".text").textContent = text;
  $("status").title = { ready: "Ready", busy: "Working", down: "Not ready" }[state];
}

function startTheme() {
  const saved = localStorage.getItem("diptych-theme");
  if (saved) document.documentElement.dataset.theme = saved;
  $("theme").addEventListener("click", () => {
    const now = document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    const next = now === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    localStorage.setItem("diptych-theme", next);
  });
}

let asking = null;

/** Ask for the key; all requests that need it wait for the one answer. */
function ask(again) {
  asking ??= new Promise((done) => {
    $("ask-title").textContent = again ? "That key is not accepted; try another" : "This server asks for an API key";
    $("ask").showModal();
    $("ask").addEventListener("close", () => done($("ask-key").value.trim()), { once: true });
  }).finally(() => {
    asking = null;
  });
  return asking;
}

onKeyNeeded(async (again) => {
  const given = await ask(again);
  $("key").hidden = false;
  return given;
});
$("key").addEventListener("click", async () => {
  setKey(await ask(false));
  refresh();
});
$("more").addEventListener("click", () => {
  pages += 1;
  refresh();
});
startTheme();
viewer.start();
form.start(() => refresh());
refresh();
setInterval(() => document.hidden || refresh(), EVERY);
