// Prompts: what the form shows at first, and what the text of the form means.

import { isWorkedExample } from "./articles.js";

/**
 * @import { Prompt } from "./answers.js"
 * @import { Service } from "./view.js"
 */

const EXAMPLE = "When Mary and John went to the park, John gave a ball to";
const OTHER_EXAMPLE = "When Mary and John went to the park, Mary gave a ball to"; // as many tokens, another answer
const EXAMPLE_IDS = 8;
const LIST_OF_IDS = /^\s*\[\s*(\d+\s*(,\s*\d+\s*)*)?\]\s*$/;

/**
 * The prompt that a model has at first: an example sentence, the prompt of the article for a worked example, or some
 * token ids if the served model has no tokenizer. `name`: "" for the served model.
 * @param {Service} service
 * @param {string} name
 */
export function defaultPrompt(service, name) {
  const entry = service.models.find((model) => model.name === name) ?? (service.model ? null : service.models[0]);
  if (entry?.kind === "worked_example") return entry.prompt.text;
  if (!service.model || hasTokenizer(service)) return EXAMPLE;
  const size = service.model.config.vocab_size;
  const ids = Array.from({ length: Math.min(EXAMPLE_IDS, size) }, (_, index) => Math.min(index + 1, size - 1));
  return `[${ids.join(", ")}]`;
}

/**
 * The prompt for a request: a text, or a list of ids if the served model has no tokenizer and the text is a list.
 * @param {Service} service
 * @param {string} name
 * @param {string} text
 * @returns {Prompt}
 */
export function readPrompt(service, name, text) {
  if (isWorkedExample(service, name) || hasTokenizer(service) || !LIST_OF_IDS.test(text)) return text;
  return JSON.parse(text);
}

/**
 * A text to compare a prompt with, as the form has it at first: an example, or the prompt itself, to change a word of.
 * @param {Prompt} prompt
 */
export function otherPrompt(prompt) {
  if (prompt === EXAMPLE) return OTHER_EXAMPLE;
  return typeof prompt === "string" ? prompt : `[${prompt.join(", ")}]`;
}

/** @param {Service} service */
function hasTokenizer(service) {
  return service.model?.capabilities.tokenizer !== false;
}
