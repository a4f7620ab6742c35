// Requests to the service: JSON, safetensors, and streams of events.

/** @import { DType, GenerateEvent, GetAnswers, PostAnswers, SweepEvent } from "./answers.js" */

/**
 * The numbers of a tensor, by its number format.
 * @typedef {{
 *   float64: Float64Array, float32: Float32Array, bfloat16: Float32Array, float16: Float32Array, uint8: Uint8Array,
 *   int64: number[],
 * }} NumbersOf
 * @typedef {NumbersOf[DType]} Numbers
 */

const KEY = "forwardscope-api-key";

/** An answer that is an error, or no answer at all (status 0). `param` names the field that the error concerns. */
export class ApiError extends Error {
  /**
   * @param {number} status
   * @param {string} message
   * @param {string | null} param
   * @param {string | null} code
   */
  constructor(status, message, param = null, code = null) {
    super(message);
    this.status = status;
    this.param = param;
    this.code = code;
  }
}

/** @typedef {(wasWrong: boolean) => Promise<string | null>} AskForKey */

/** @type {{ askForKey: AskForKey }} */
const listeners = { askForKey: async () => null };

/**
 * Set the function that asks the user for an API key. It resolves to the key, or null.
 * @param {AskForKey} ask
 */
export function onKeyNeeded(ask) {
  listeners.askForKey = ask;
}

/**
 * Send a request to the service. Its address is relative to the page, which a proxy may serve below any path.
 * @param {"GET" | "POST"} method
 * @param {string} path
 * @param {object | undefined} body
 * @param {AbortSignal | undefined} signal
 * @param {string} accept
 * @returns {Promise<Response>}
 */
async function send(method, path, body, signal, accept) {
  const key = sessionStorage.getItem(KEY);
  /** @type {Record<string, string>} */
  const headers = { Accept: accept };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  if (key !== null) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(`.${path}`, {
      method,
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
    });
  } catch (error) {
    if (isAbort(error)) throw error;
    throw new ApiError(0, "The service does not answer. The page tries again until it does.");
  }
  if (response.ok) return response;
  if (response.status === 401 && (await findKey(key))) return send(method, path, body, signal, accept);
  throw await readError(response);
}

/**
 * Whether an error says that a request was given up, as its signal asked.
 * @param {unknown} error
 */
export function isAbort(error) {
  return error instanceof Error && error.name === "AbortError";
}

/**
 * Find another key than the one that was refused. Returns whether there is one.
 * @param {string | null} refused
 */
async function findKey(refused) {
  if (sessionStorage.getItem(KEY) !== refused) return true; // another request has asked for it meanwhile
  const given = await listeners.askForKey(refused !== null);
  if (given !== null) sessionStorage.setItem(KEY, given);
  return given !== null;
}

/** Whether requests of this tab send an API key. */
export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

/** @param {Response} response */
async function readError(response) {
  try {
    const { error } = await response.json();
    return new ApiError(response.status, error.message, error.param, error.code);
  } catch {
    return new ApiError(response.status, `The service answered with status ${response.status}.`);
  }
}

/**
 * GET a JSON answer.
 * @template {keyof GetAnswers} Path
 * @param {Path} path
 * @param {AbortSignal} [signal]
 * @returns {Promise<GetAnswers[Path]>}
 */
export async function getJson(path, signal) {
  return (await send("GET", path, undefined, signal, "application/json")).json();
}

/**
 * POST a body, and return the JSON answer.
 * @template {keyof PostAnswers} Path
 * @param {Path} path
 * @param {object} body
 * @param {AbortSignal} [signal]
 * @returns {Promise<PostAnswers[Path]>}
 */
export async function postJson(path, body, signal) {
  return (await send("POST", path, body, signal, "application/json")).json();
}

/**
 * POST a body, and return the answer as a Blob in the form of safetensors, for a download.
 * @param {string} path
 * @param {object} body
 * @param {AbortSignal} [signal]
 */
export async function postBlob(path, body, signal) {
  return (await send("POST", path, body, signal, "application/x-safetensors")).blob();
}

/**
 * POST a body, and return the answer without its numbers, and the tensors: name → {shape, values}. Large rows
 * arrive faster than as JSON.
 * @param {string} path
 * @param {object} body
 * @param {AbortSignal} [signal]
 * @returns {Promise<{ answer: any, tensors: Record<string, Tensor> }>}
 */
export async function postPass(path, body, signal) {
  const content = await (await postBlob(path, body, signal)).arrayBuffer();
  const begin = 8 + Number(new DataView(content).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(content.slice(8, begin)));
  const tensors = Object.entries(header).filter(([name]) => name !== "__metadata__");
  const read = (/** @type {TensorEntry} */ { dtype, shape, data_offsets: [first, end] }) => ({
    shape,
    values: ARRAYS[DTYPES[dtype]](content.slice(begin + first, begin + end)),
  });
  return {
    answer: JSON.parse(header.__metadata__.forwardscope),
    tensors: Object.fromEntries(tensors.map(([name, entry]) => [name, read(entry)])),
  };
}

/** @typedef {{ shape: number[], values: Numbers }} Tensor */
/** @typedef {{ dtype: keyof typeof DTYPES, shape: number[], data_offsets: [number, number] }} TensorEntry */

/**
 * POST a body, and yield each event of the stream as an object, until "[DONE]".
 * @param {string} path
 * @param {object} body
 * @param {AbortSignal} signal
 * @returns {AsyncGenerator<GenerateEvent & SweepEvent, void>}
 */
export async function* postStream(path, body, signal) {
  const response = await send("POST", path, { ...body, stream: true }, signal, "text/event-stream");
  const stream = /** @type {ReadableStream<Uint8Array<ArrayBuffer>>} */ (response.body); // a POST has one
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new ApiError(0, "The stream ended before the answer was complete.");
      text += value;
      const frames = text.split("\n\n");
      text = frames.pop() ?? "";
      for (const frame of frames) {
        const data = frame
          .split("\n")
          .filter((line) => line.startsWith("data: "))
          .map((line) => line.slice(6))
          .join("\n");
        if (data === "[DONE]") return;
        if (data === "") continue;
        const event = JSON.parse(data);
        if (event.error) throw new ApiError(200, event.error.message, event.error.param, event.error.code);
        yield event;
      }
    }
  } catch (error) {
    if (error instanceof ApiError || isAbort(error)) throw error;
    throw new ApiError(0, "The connection was lost before the answer was complete.");
  } finally {
    reader.cancel().catch(() => {}); // the stream may have failed already; its error was thrown above
  }
}

/** @type {{ [Name in DType]: (buffer: ArrayBuffer) => NumbersOf[Name] }} */
const ARRAYS = {
  float64: (buffer) => new Float64Array(buffer),
  float32: (buffer) => new Float32Array(buffer),
  // the upper half of float32
  bfloat16: (buffer) => new Float32Array(Uint32Array.from(new Uint16Array(buffer), (bits) => bits << 16).buffer),
  float16: halves,
  uint8: (buffer) => new Uint8Array(buffer),
  int64: (buffer) => Array.from(new BigInt64Array(buffer), Number),
};

const DTYPES = /** @type {const} */ ({
  F64: "float64",
  F32: "float32",
  BF16: "bfloat16",
  F16: "float16",
  U8: "uint8",
  I64: "int64",
});

/**
 * The numbers of a base64 text in the service's encoding: little-endian bytes in row order.
 * @template {DType} Name
 * @param {string} base64
 * @param {Name} dtype
 * @returns {NumbersOf[Name]}
 */
export function decode(base64, dtype) {
  const text = atob(base64);
  const data = new Uint8Array(text.length);
  for (let index = 0; index < text.length; index++) data[index] = text.charCodeAt(index);
  return ARRAYS[dtype](data.buffer);
}

/**
 * Numbers in base64, as edits take them.
 * @param {Float32Array} numbers
 */
export function encode(numbers) {
  const bytes = new Uint8Array(numbers.buffer, numbers.byteOffset, numbers.byteLength);
  const text = Array.from(bytes, (byte) => String.fromCharCode(byte)).join("");
  return { data: btoa(text), dtype: "float32", shape: [numbers.length] };
}

/** @param {ArrayBuffer} buffer */
function halves(buffer) {
  return Float32Array.from(new Uint16Array(buffer), (bits) => {
    const sign = bits & 0x8000 ? -1 : 1;
    const [exponent, fraction] = [(bits >> 10) & 31, bits & 1023];
    if (exponent === 31) return fraction ? NaN : sign * Infinity;
    return exponent === 0 ? sign * fraction * 2 ** -24 : sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
  });
}
