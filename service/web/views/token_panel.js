// What else was likely at a place of the continuation, and how temperature, top-k and top-p change the distribution
// there.

import { postPass } from "../api.js";
import { actionButton, el } from "../dom.js";
import { barTable } from "../draw/bars.js";
import { count, number, percent, quoted, shown } from "../format.js";
import { SamplingControls, eachSetting } from "../sampling_controls.js";
import { distribution } from "../softmax.js";
import { withTerms } from "../terms.js";

/**
 * @import { Logprob } from "../answers.js"
 * @import { Numbers } from "../api.js"
 * @import { Name, Texts } from "../sampling_controls.js"
 * @typedef {{ id: number, text: string | null, probability: number | null, top: Logprob[] }} Generated a token
 * @typedef {{
 *   model: string | null, ids: number[], token: Generated, index: number, wasGreedy: boolean, tried: Texts,
 *   canContinue: boolean,
 * }} Place `ids`: the tokens before the place; `token`: the one that was chosen there; `wasGreedy`: with temperature 0;
 * `tried`: texts of the sliders
 */

/** The panel. `onTry(values)`: the sliders rest; `onContinue(token)`: the text shall go on with an alternative. */
export class TokenPanel {
  element = el("section", { class: "card", "aria-label": "Alternatives", hidden: true });
  #heading = el("h3");
  #position = el("p", { class: "faint" });
  #why = el("p", { class: "faint" });
  #hint = el("p", { class: "faint" });
  #said = el("p");
  #bars = el("div");
  #sliders;
  #onContinue;
  /** @type {Place} */
  #place;
  /** @type {{ key: string, logits: Numbers }} */
  #row = { key: "", logits: [] };

  /** @param {{ onTry: (values: Texts) => void, onContinue: (token: Logprob) => void }} listeners */
  constructor({ onTry, onContinue }) {
    this.#onContinue = onContinue;
    this.#sliders = new SamplingControls({
      said: "for this token",
      before: "what-if ",
      onInput: (values) => this.#draw(values),
      onChange: onTry,
    });
    this.element.append(
      this.#heading,
      this.#position,
      el(
        "div",
        { class: "beside" },
        el("div", {}, this.#bars, this.#hint),
        el(
          "div",
          {},
          el("h4", {}, "What if: other settings for this token"),
          el("p", {}, withTerms("The page computes {softmax} from the {logit|logits}; the text above stays.")),
          this.#sliders.element,
          this.#why,
          this.#said,
        ),
      ),
    );
  }

  clear() {
    this.element.hidden = true;
  }

  /**
   * @param {Place} place
   * @param {AbortSignal} signal
   */
  async show(place, signal) {
    const key = JSON.stringify([place.model, place.ids]);
    if (this.#row.key !== key) {
      const body = { ...(place.model && { model: place.model }), prompt: place.ids, positions: "last" };
      const { tensors } = await postPass("/logits", body, signal);
      this.#row = { key, logits: tensors.logits.values };
    }
    this.#place = place;
    const { token, index } = place;
    const { logits } = this.#row;
    const above = Array.prototype.filter.call(logits, (logit) => logit > logits[token.id]);
    this.#heading.textContent =
      `Token ${index + 1} of the continuation: ${quoted(token)}, probability ${percent(token.probability)}, ` +
      `no. ${count(above.length + 1)} of ${count(logits.length)}`; // the table counts from 1, too
    const position = count(place.ids.length);
    this.#position.textContent = `Position ${position} in the other views, which count from 0 and with the prompt.`;
    this.#why.textContent = place.wasGreedy
      ? "The text had temperature 0, which leaves one token. Here it starts at 1: the network alone."
      : "";
    this.#hint.textContent = place.canContinue
      ? "“Continue” runs the text up to that token as the prompt. Back undoes this."
      : "";
    this.#sliders.show(place.tried);
    this.element.hidden = false;
    this.#draw(place.tried);
  }

  /** @param {Texts} texts */
  #draw(texts) {
    const settings = eachSetting(({ name }) => (texts[name].trim() === "" ? NaN : Number(texts[name])));
    const problem = problemOf(settings);
    this.#said.classList.toggle("error", problem !== null);
    this.#said.textContent = problem;
    if (problem !== null) return;
    const { logits } = this.#row;
    const plain = distribution(logits);
    const changed = distribution(logits, {
      temperature: settings.temperature,
      topK: settings.top_k,
      topP: settings.top_p,
    });
    const remaining = changed.filter((probability) => probability > 0).length;
    this.#said.textContent = `With these settings, ${count(remaining)} of ${count(logits.length)} tokens can be drawn.`;
    this.#bars.replaceChildren(this.#table(logits, plain, changed));
  }

  /**
   * @param {Numbers} logits
   * @param {Float64Array} plain
   * @param {Float64Array} changed
   */
  #table(logits, plain, changed) {
    const { token, canContinue } = this.#place;
    const own = { ...token, logprob: null }; // only its id and its text are shown
    const listed = token.top.some(({ id }) => id === token.id) ? token.top : [...token.top, own];
    const rows = listed.map((entry, index) => ({
      cells: [
        el(
          "span",
          {},
          el("span", { class: "faint" }, index < token.top.length ? `${index + 1}. ` : "… "),
          el("code", {}, shown(entry)),
          entry.id === token.id ? el("strong", {}, " ← chosen") : "",
        ),
        changed[entry.id] === 0 ? "excluded" : percent(changed[entry.id]),
        percent(plain[entry.id]),
        number(logits[entry.id]),
        String(entry.id),
        canContinue && entry.id !== token.id && entry.text ? this.#continueButton(entry) : "",
      ],
      shares: [plain[entry.id], changed[entry.id]],
      mark: entry.id === token.id,
    }));
    const columns = ["token", "with these settings", "network alone", "logit", "id", ""];
    const caption = "Thick bars: with these settings; thin bars: the network alone (temperature 1, all tokens).";
    return barTable({ caption, columns, rows });
  }

  /** @param {Logprob} entry */
  #continueButton(entry) {
    const title = `Continue from this token instead: ${quoted(entry)}`;
    const look = { class: "small", title, "aria-label": title };
    return actionButton("Continue", () => this.#onContinue(entry), look);
  }
}

/**
 * Why settings are no distribution, or null. The service has the same limits.
 * @param {Record<Name, number>} settings
 */
function problemOf({ temperature, top_k: topK, top_p: topP }) {
  if (!(temperature >= 0)) return "The temperature must be a number of at least 0.";
  if (!Number.isInteger(topK) || topK < 0) return "Top-k must be a whole number of at least 0.";
  if (!(topP > 0 && topP <= 1)) return "Top-p must be a number above 0 and at most 1.";
  return null;
}
