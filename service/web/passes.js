// Answers that several views use, kept so that switching between views computes nothing again.

import { getJson, postJson } from "./api.js";

/** @import { GetAnswers, PostAnswers } from "./answers.js" */

const MAX_ENTRIES = 60;
const MAX_CHARACTERS = 40e6;
/** @type {Map<string, { answer: any, characters: number }>} the least recently used first */
const answers = new Map();

/**
 * POST a body whose answer depends on nothing else, and keep the answer. A kept answer needs no request.
 * @template {keyof PostAnswers} Path
 * @param {Path} path
 * @param {object} body
 * @param {AbortSignal} [signal]
 * @returns {Promise<PostAnswers[Path]>}
 */
export function cached(path, body, signal) {
  return keep(JSON.stringify([path, body]), () => postJson(path, body, signal));
}

/**
 * GET an answer that depends on nothing else, and keep it.
 * @template {keyof GetAnswers} Path
 * @param {Path} path
 * @param {AbortSignal} [signal]
 * @returns {Promise<GetAnswers[Path]>}
 */
export function cachedGet(path, signal) {
  return keep(path, () => getJson(path, signal));
}

/**
 * @template Answer
 * @param {string} key
 * @param {() => Promise<Answer>} ask
 * @returns {Promise<Answer>}
 */
async function keep(key, ask) {
  const kept = answers.get(key);
  if (kept) {
    answers.delete(key);
    answers.set(key, kept);
    return kept.answer;
  }
  const answer = await ask();
  answers.set(key, { answer, characters: size(answer) });
  let total = 0;
  for (const entry of answers.values()) total += entry.characters;
  for (const [oldest, entry] of answers) {
    if (answers.size <= MAX_ENTRIES && total <= MAX_CHARACTERS) break;
    if (oldest === key) continue;
    answers.delete(oldest);
    total -= entry.characters;
  }
  return answer;
}

/** Forget all answers: the service was restarted, and may serve another model. */
export function forget() {
  answers.clear();
}

/**
 * About how many characters an answer holds.
 * @param {unknown} value
 * @returns {number}
 */
function size(value) {
  if (typeof value === "string") return value.length;
  if (value === null || typeof value !== "object") return 8;
  let total = 0;
  for (const part of Array.isArray(value) ? value : Object.values(value)) total += size(part);
  return total;
}
