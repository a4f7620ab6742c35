// Answers that several views use, kept so that switching between views computes nothing again.

import { postJson } from "./api.js";

/** @import { PostAnswers } from "./answers.js" */

const MAX_ENTRIES = 12;
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
export async function cached(path, body, signal) {
  const key = JSON.stringify([path, body]);
  const kept = answers.get(key);
  if (kept) {
    answers.delete(key);
    answers.set(key, kept);
    return kept.answer;
  }
  const answer = await postJson(path, body, signal);
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
