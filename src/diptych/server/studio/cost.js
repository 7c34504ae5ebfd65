// What a request costs, before it is sent: relative to the model's own default, and in seconds once this server
// has made clips to compare with.

/** Video tokens of a clip: latent frames x rows x columns of 16 pixels. */
export const tokens = ({ width, height, frames }) => (Math.floor((frames - 1) / 4) + 1) * (width / 16) * (height / 16);

/**
 * Work in units that compare clips. Matrix products grow with the tokens, attention with their square; at 864x480 and
 * 121 frames (50,220 tokens) video self-attention is 58 % of the large model.
 */
export function work(request) {
  const n = tokens(request);
  const forwards = request.steps * (request.guidance > 1 ? 2 : 1) * (request.outputs ?? 1);
  return forwards * n * (0.42 + 0.58 * (n / 50220));
}

/** Seconds a unit of work took in the latest clips, or null when there are none. */
export function pace(jobs) {
  const known = jobs
    .filter((job) => job.status === "completed" && job.inference_time_s > 0)
    .slice(0, 8)
    .map((job) => job.inference_time_s / work(fromJob(job)))
    .sort((a, b) => a - b);
  return known.length ? known[Math.floor(known.length / 2)] : null;
}

export function fromJob(job) {
  const [width, height] = job.size.split("x").map(Number);
  return {
    width,
    height,
    frames: job.num_frames,
    steps: job.num_inference_steps,
    guidance: job.guidance_scale,
    outputs: job.num_outputs,
  };
}

export function duration(seconds) {
  if (seconds < 1) return "under a second";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}
