// Talking to the server. All addresses are relative, so the page works under any prefix.

let key = sessionStorage.getItem("diptych-key") ?? "";
let askForKey = async () => "";

export function onKeyNeeded(ask) {
  askForKey = ask;
}

export function setKey(value) {
  key = value;
  sessionStorage.setItem("diptych-key", value);
}

/** An answer other than 2xx: `message` is the server's sentence, `param` the field it is about. */
export class Refused extends Error {
  constructor(status, error) {
    super(error?.message ?? `The server answered ${status}.`);
    this.status = status;
    this.code = error?.code;
    this.param = error?.param;
  }
}

async function send(path, options = {}) {
  for (;;) {
    const headers = { ...(options.headers ?? {}) };
    if (key) headers.Authorization = `Bearer ${key}`;
    const answer = await fetch(path, { ...options, headers });
    if (answer.status === 401) {
      setKey(await askForKey(key !== ""));
      continue;
    }
    if (!answer.ok) {
      const body = await answer.json().catch(() => ({}));
      throw new Refused(answer.status, body.error);
    }
    return answer;
  }
}

export const get = async (path) => (await send(path)).json();
export const post = async (path, body) => {
  const json = !(body instanceof FormData) && body !== undefined;
  const options = { method: "POST", body: json ? JSON.stringify(body) : body };
  if (json) options.headers = { "Content-Type": "application/json" };
  return (await send(path, options)).json();
};
export const remove = async (id) => (await send(`v1/videos/${id}`, { method: "DELETE" })).json();
export const cancel = (id) => post(`v1/videos/${id}/cancel`);

const blobs = new Map();

/** An object URL of a clip or a picture of it; fetched once. */
export function blobUrl(id, variant) {
  const name = `${id}/${variant}`;
  if (!blobs.has(name)) {
    const made = send(`v1/videos/${id}/content?variant=${variant}`)
      .then((answer) => answer.blob())
      .then((blob) => URL.createObjectURL(blob));
    made.catch(() => blobs.delete(name));
    blobs.set(name, made);
  }
  return blobs.get(name);
}

export async function forget(id) {
  for (const [name, made] of blobs) {
    if (name.startsWith(`${id}/`)) {
      blobs.delete(name);
      made.then(URL.revokeObjectURL, () => {});
    }
  }
}

/** Follow a clip; `tell(event, data)` until it ends or `signal` aborts. */
export async function follow(id, tell, signal) {
  const answer = await send(`v1/videos/${id}/events`, { signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const field = (name) => block.match(new RegExp(`^${name}: (.*)$`, "m"))?.[1];
      if (field("event")) tell(field("event"), JSON.parse(field("data")));
    }
  }
}
