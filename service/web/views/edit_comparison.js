// The pass without edits beside the edited one: predictions of one position, the loss, and how far each stage moved.

import { el } from "../dom.js";
import { barTable, predictionTable } from "../draw/bars.js";
import { number, percent, quoted, shown, signed } from "../format.js";
import { placeName } from "../network/names.js";

/**
 * @import { ForwardAnswer, PositionPredictions, Prediction, StageChange, Token } from "../answers.js"
 */

const NUM_SHOWN = 10;

/**
 * A difference of probabilities, in percentage points.
 * @param {number} difference
 */
function points(difference) {
  const value = 100 * difference;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 0.01) return value > 0 ? "< +0.01" : "> −0.01";
  return `${value > 0 ? "+" : "−"}${size >= 10 ? size.toFixed(1) : size.toFixed(2)}`;
}

/** <edit-comparison>. `show(answer)`: an answer of POST /forward for one position, with or without `baseline`. */
export class EditComparison extends HTMLElement {
  #answer = el("p", { class: "answer" });
  #loss = el("p");
  #predictions = el("div");
  #stages = el("div", { class: "moved" });

  connectedCallback() {
    if (this.childElementCount === 0)
      this.append(this.#answer, this.#loss, el("div", { class: "beside" }, this.#predictions, this.#stages));
  }

  /** Show nothing, because there is no answer. */
  clear() {
    this.#answer.textContent = this.#loss.textContent = "";
    this.#predictions.replaceChildren();
    this.#stages.replaceChildren();
  }

  /** @param {ForwardAnswer} answer */
  show(answer) {
    const plain = (answer.baseline ?? answer).predictions[0];
    const edited = answer.baseline ? answer.predictions[0] : null;
    const token = answer.tokens[plain.position];
    this.#answer.textContent = edited
      ? verdict(plain.top[0], edited, token, plain.position)
      : `Without edits, the most likely token after ${quoted(token)} (position ${plain.position}) is ` +
        `${quoted(plain.top[0])}: ${percent(plain.top[0].probability)}.`;
    this.#loss.textContent = lossOf(answer);
    const caption = "The most likely next tokens (temperature 1, whole vocabulary)";
    this.#predictions.replaceChildren(
      edited ? this.#both(plain, edited) : predictionTable(caption, plain.top.slice(0, NUM_SHOWN)),
    );
    this.#stages.replaceChildren(edited ? moved(answer.changes ?? []) : "");
    this.#stages.hidden = !edited;
  }

  /**
   * @param {PositionPredictions} plain
   * @param {PositionPredictions} edited
   */
  #both(plain, edited) {
    const [before, after] = [plain, edited].map(({ top }) => new Map(top.map((each) => [each.id, each])));
    const ids = new Set([...plain.top.slice(0, NUM_SHOWN), ...edited.top.slice(0, NUM_SHOWN)].map(({ id }) => id));
    const size = (/** @type {number} */ id) =>
      Math.max(before.get(id)?.probability ?? 0, after.get(id)?.probability ?? 0);
    const rows = [...ids]
      .sort((a, b) => size(b) - size(a))
      .map((id) => {
        const [one, other] = [before.get(id), after.get(id)];
        const differences =
          one && other ? [gain(one, other), signed((other.logit ?? NaN) - (one.logit ?? NaN))] : ["–", "–"];
        const isTop = id === plain.top[0].id || id === edited.top[0].id;
        return {
          cells: [
            shown(one ?? other ?? { id }),
            one ? percent(one.probability) : below(plain.top),
            other ? percent(other.probability) : below(edited.top),
            ...differences,
          ],
          shares: [one?.probability ?? 0, other?.probability ?? 0],
          mark: isTop,
        };
      });
    return barTable({
      caption:
        "The most likely next tokens (temperature 1, whole vocabulary). Thin bar: without edits; thick bar: with " +
        "them; framed: the most likely of each. Near 0 and 100 %, compare the logits. A probability falls although " +
        "its logit rises if other logits rise more.",
      columns: ["token", "without", "with", "difference, percentage points", "difference of the logit"],
      rows,
    });
  }
}

/**
 * The difference of the probabilities of a token.
 * @param {Prediction} before
 * @param {Prediction} after
 */
function gain(before, after) {
  return points((after.probability ?? 0) - (before.probability ?? 0));
}

/**
 * @param {Prediction} plain
 * @param {PositionPredictions} edited
 * @param {Token} token
 * @param {number} position
 */
function verdict(plain, edited, token, position) {
  const place = `after ${quoted(token)} (position ${position})`;
  const best = edited.top[0];
  const now = edited.top.find(({ id }) => id === plain.id);
  if (best.id === plain.id)
    return (
      `The most likely token ${place} stays ${quoted(plain)}: ${percent(plain.probability)} without edits, ` +
      `${percent(best.probability)} with them (${gain(plain, best)} percentage points).`
    );
  const fall = now
    ? ` ${quoted(plain)} goes from ${percent(plain.probability)} to ${percent(now.probability)} ` +
      `(${gain(plain, now)} percentage points).`
    : "";
  return (
    `The most likely token ${place} changes from ${quoted(plain)} to ${quoted(best)}: ${quoted(best)} has ` +
    `${percent(best.probability)} with the edits.${fall}`
  );
}

/** @param {Prediction[]} top */
function below(top) {
  return percent(top.at(-1)?.probability).replace(/^(?!<)/, "≤\u00a0");
}

/** @param {ForwardAnswer} answer */
function lossOf({ loss, baseline }) {
  if (loss === null || loss.mean === null) return "";
  return baseline
    ? `Mean loss of the prompt: ${number(baseline.loss.mean)} without edits, ${number(loss.mean)} with them.`
    : `Mean loss of the prompt: ${number(loss.mean)}.`;
}

/**
 * How far the edits moved each stage, in the order of the computation.
 * @param {StageChange[]} changes
 */
function moved(changes) {
  const largest = Math.max(...changes.map(({ relative }) => relative ?? 0), 1e-12);
  return barTable({
    caption:
      "How far the edits moved each stage at this position. Share (bars): the length of the difference ÷ the " +
      "length without edits.",
    columns: ["stage", "share", "length of the difference"],
    rows: changes.map(({ name, norm, relative }) => ({
      cells: [nameOf(name), relative === null ? "–" : percent(relative), number(norm)],
      shares: [(relative ?? 0) / largest],
    })),
  });
}

/** @param {string} stage */
function nameOf(stage) {
  const [, layer, part] = /^blocks\.(\d+)\.(.+)$/.exec(stage) ?? [];
  return part === "resid_post" ? `after ${placeName(layer)}` : stage;
}

customElements.define("edit-comparison", EditComparison);
