// The lessons of the view "Network": the way of one token, and the five articles. chapters.js has their steps.

import { ARTICLES } from "../terms_list.js";

/**
 * @typedef {{ title: string, address?: string, model?: string }} Lesson `model`: the worked example; without one, the
 *   served model
 */

/** Name → lesson. @type {Record<string, Lesson | undefined>} */
export const LESSONS = {
  "": { title: "Follow a token" },
  journey: { ...ARTICLES.journey, model: "a-tokens-journey" },
  forward: { ...ARTICLES.forward, model: "ai-rocks" },
  modern: ARTICLES.modern,
  gpt: ARTICLES.gpt,
  loss: { ...ARTICLES.loss, model: "i-like-transformers" },
};
