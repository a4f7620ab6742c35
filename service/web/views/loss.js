// The view "Loss": how well the network predicted each token of the prompt from the tokens before it.

import { ARTICLES, isWorkedExample } from "../articles.js";
import { el } from "../dom.js";
import { barLegend, predictionTable } from "../draw/bars.js";
import { dataTable } from "../draw/data_table.js";
import "../draw/token_strip.js";
import { number, percent, quoted, shown } from "../format.js";
import { isOther, isPosition, readPosition } from "../indices.js";
import { cached } from "../passes.js";
import { note, term, withTerms } from "../terms.js";
import { View, bodyOf } from "../view.js";

/**
 * @import { ForwardAnswer, Prediction, Token } from "../answers.js"
 * @import { Update, ViewState } from "../view.js"
 * @typedef {ViewState & typeof Loss.params} State
 * @typedef {{ token: Token, position: number, loss: number | null, guesses: Prediction[] }} Predicted
 * @typedef {Predicted & { loss: number }} Known
 * @typedef {{
 *   state: State, body: Record<string, unknown>, answer: ForwardAnswer, predicted: Predicted[],
 * }} Shown
 */

const NUM_GUESSES = 5;
const NUM_SURPRISES = 3;

export default class Loss extends View {
  static showsWorkedExamples = true;
  /** `position`: the token whose loss is explained; "" is the one with the highest loss. */
  static params = { position: "" };

  #answer = el("p", { class: "answer" });
  #strip = el("token-strip", { class: "with-numbers", signs: true });
  #legend = el("p", { class: "legend" });
  #formula = el("p", { class: "formula" });
  #summary = el("section", { "aria-label": "Perplexity" });
  #one = el("section", { "aria-label": "The selected token" });
  #table = dataTable(() => this.#tableOf());
  /** @type {Shown} */
  #shown;

  build() {
    const meaning = note(
      "The number below a token is its {loss}: how badly the network predicted it from the tokens before " +
        "it. Select one to see what was expected instead. In the view Forward pass, each loss stands one " +
        "position earlier.",
    );
    this.#summary.append(el("h3", {}, "From losses to perplexity"), this.#formula, this.#table);
    const beside = el("div", { class: "beside" }, this.#one, this.#summary);
    this.append(this.#answer, meaning, this.#strip, this.#legend, beside);
    this.#strip.addEventListener("choose", ({ detail }) =>
      this.context.navigate({ position: String(this.#shown.predicted[detail.index].position) }),
    );
  }

  /** @type {Update<State>} */
  async update(state, signal) {
    const body = this.#body(state);
    const answer = await cached("/forward", body, signal);
    const predicted = predictedTokens(answer, ARTICLES[state.model ?? ""]?.target);
    const isStale =
      state.position !== "" && isOther(this.#shown?.state, state) && !isPosition(state.position, predicted.length);
    if (isStale) return this.context.navigate({ position: "" }, { replace: true });
    const selected =
      state.position === ""
        ? (highest(predicted) ?? predicted[0])
        : predicted[readPosition(state.position, predicted.length)];
    this.#shown = { state, body, answer, predicted };
    this.#showAll(selected);
    this.#showOne(selected);
    this.#table.refresh();
    return undefined;
  }

  request() {
    return this.#shown && { path: "/forward", body: this.#shown.body };
  }

  pictures() {
    return this.#shown ? [{ name: "losses", element: this.#strip }] : [];
  }

  /** @param {State} state */
  #body(state) {
    const isExample = isWorkedExample(this.context.service, state.model);
    const top_k = isExample ? {} : { top_k: Math.min(NUM_GUESSES, this.model.sizes.d_vocab) };
    return { ...bodyOf(state), stages: ["loss"], detail: "none", ...top_k };
  }

  /** @param {Predicted} selected */
  #showAll(selected) {
    const { answer, predicted } = this.#shown;
    const known = predicted.filter(isKnown);
    const worst = highest(predicted);
    this.#strip.show(
      "Tokens of the prompt, with the loss of predicting each one",
      predicted.map(({ token, loss }) => ({
        ...{ token, share: (loss ?? 0) / (worst?.loss ?? 1) },
        said: loss === null ? "–" : loss.toFixed(loss < 10 ? 3 : 2), // fits below the token
      })),
    );
    this.#strip.mark(predicted.indexOf(selected));
    this.#legend.replaceChildren(
      ...(worst ? ["Loss in ", term("nat", "nats"), ": ", barLegend("0", number(worst.loss))] : []),
    );
    const { mean, perplexity } = answer.loss;
    this.#summary.hidden = !worst;
    const means = `The mean loss is ${number(mean)}, the perplexity ${number(perplexity)}.`;
    this.#answer.textContent = worst
      ? `${surprises(known)} ${means}`
      : "There is no loss: the network needs at least two tokens to predict one from another.";
    const total = known.reduce((sum, { loss }) => sum + loss, 0);
    this.#formula.replaceChildren(
      ...withTerms(
        `mean loss ({cross_entropy}) = ${number(total)} ÷ ${known.length} = ${number(mean)} · {perplexity} ` +
          `= e^${number(mean)} = ${number(perplexity)}`,
      ),
    );
  }

  /** @param {Predicted} predicted */
  #showOne({ token, position, loss, guesses }) {
    if (loss === null) {
      const reason =
        position === 0
          ? "it is the first token, so the network had nothing to predict it from."
          : "the article gives no loss for it.";
      return this.#one.replaceChildren(
        el("h3", {}, `${shown(token)} (position ${position})`),
        el("p", {}, `${quoted(token)} has no loss: ${reason}`),
      );
    }
    const probability = Math.exp(-loss);
    const place = guesses.findIndex(({ id }) => id === token.id);
    const verdict =
      place === 0
        ? "It was the most likely token."
        : place > 0
          ? `It was number ${place + 1} among the most likely tokens.`
          : `It is not among the ${guesses.length} most likely tokens.`;
    return this.#one.replaceChildren(
      el("h3", {}, `${shown(token)} (position ${position})`),
      el(
        "p",
        { class: "answer" },
        `loss = −ln p = −ln ${number(probability)} = ${number(loss)}: ${quoted(token)} had a probability of ` +
          `${percent(probability)}. ${verdict}`,
      ),
      predictionTable(
        `What the network expected at position ${position} (temperature 1, whole vocabulary)`,
        guesses,
        token.id,
      ),
    );
  }

  #tableOf() {
    return {
      caption: "Loss of predicting each token from the tokens before it",
      columns: ["position", "token", "probability", "loss", "most likely instead", "its probability"],
      rows: this.#shown.predicted.map(({ token, position, loss, guesses }) => [
        String(position),
        shown(token),
        loss === null ? "–" : percent(Math.exp(-loss)),
        number(loss),
        guesses.length > 0 ? shown(guesses[0]) : "–",
        guesses.length > 0 ? percent(guesses[0].probability) : "–",
      ]),
    };
  }
}

/**
 * Each token with the loss of predicting it: {token, position, loss, guesses}. The service gives the loss of the token
 * after each position, so it moves by one place. `target`: the token after the prompt, if an article has one.
 * @param {ForwardAnswer} answer
 * @param {Token | undefined} target
 * @returns {Predicted[]}
 */
function predictedTokens({ tokens, loss, predictions }, target) {
  const after = target && loss.per_token.at(-1) !== null ? [{ ...target, position: tokens.length }] : [];
  return [...tokens, ...after].map((token, position) => ({
    token,
    position,
    loss: position === 0 ? null : loss.per_token[position - 1],
    guesses: position === 0 ? [] : predictions[position - 1].top.slice(0, NUM_GUESSES),
  }));
}

/**
 * The tokens that were least expected, in a sentence.
 * @param {Known[]} known
 */
function surprises(known) {
  const worst = known.toSorted((one, other) => other.loss - one.loss).slice(0, NUM_SURPRISES);
  const named = worst.map(
    ({ token, position, loss }) =>
      `${quoted(token)} at position ${position} (loss ${number(loss)}, probability ${percent(Math.exp(-loss))})`,
  );
  const last = named.pop();
  return named.length > 0
    ? `The least expected tokens: ${named.join(", ")} and ${last}.`
    : `There is one loss: ${last}.`;
}

/**
 * @param {Predicted} predicted
 * @returns {predicted is Known}
 */
function isKnown(predicted) {
  return predicted.loss !== null;
}

/**
 * The token with the highest loss, or undefined if none has one.
 * @param {Predicted[]} predicted
 */
function highest(predicted) {
  return predicted.filter(isKnown).toSorted((one, other) => other.loss - one.loss)[0];
}

customElements.define("loss-view", Loss);
