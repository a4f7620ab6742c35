// The view "Logit lens": what the network would predict after each layer, at each position.

import { el, labelled, onSubmit, select, textBox } from "../dom.js";
import { barLegend, barTable, predictionTable } from "../draw/bars.js";
import "../draw/cell_grid.js";
import { dataTable, pager } from "../draw/data_table.js";
import { count, percent, quoted, shown } from "../format.js";
import { isOther, isPosition, readChoice, readIndex } from "../indices.js";
import { cached } from "../passes.js";
import { note } from "../terms.js";
import { View, bodyOf } from "../view.js";
import { ofGeneration, ofPrompt, readEdits } from "./edit_words.js";
import { didYouMean } from "./field_message.js";
import { chance, rowName, whereItWins } from "./lens_answers.js";

/**
 * @import { Edit, LensAnswer, Prompt } from "../answers.js"
 * @import { Update, ViewState } from "../view.js"
 * @typedef {ViewState & typeof Lens.params} State
 * @typedef {{ prompt: Prompt, size: number, numGenerated: number }} Text the tokens to look at
 * @typedef {keyof typeof CELLS} Cells
 * @typedef {Text & {
 *   state: State, body: Record<string, unknown>, answer: LensAnswer, plain: LensAnswer | null, first: number,
 *   row: number, position: number, cells: Cells,
 * }} Shown `plain`: the answer without the edits, if there are edits
 */

const WINDOW = 24; // positions that are shown at once, or more where there is room
const NUM_TOKENS = 5;
const BEHIND = /^(ln_final|logits)\b/; // stages behind the residuals that the lens decodes
const CELLS = {
  token: "the most likely token",
  rank: "the rank of the followed token",
  probability: "the probability of the followed token",
};
const PIECE = "\ufffd"; // stands for bytes that are not a whole character

export default class Lens extends View {
  static needs = "attribution";
  static appliesEdits = true;
  /**
   * `row`: "" is the output; `pos`: "" is the last one; `from`: the first position shown; `token`: a token to follow.
   */
  static params = { row: "", pos: "", from: "", generate: "0", token: "", cells: "token", lens: "", edits: "[]" };

  #answer = el("p", { class: "answer" });
  #form = el("form", { class: "row", "aria-label": "Options of the logit lens" });
  #generate = el("input", { name: "generate", type: "number", min: "0", class: "short" });
  #token = textBox("token", { size: "12", placeholder: "the final one" });
  #lens = select(
    { name: "lens", onchange: ({ target }) => this.context.navigate({ lens: target.value }) },
    [["", "default"], "tuned", "plain"],
    "",
  );
  #cells = select(
    { name: "cells", onchange: ({ target }) => this.context.navigate({ cells: target.value }) },
    Object.entries(CELLS),
    "token",
  );
  #hint = el("p", { class: "row is-kept", role: "status" });
  #generated = el("p", { class: "faint" });
  #pager = el("div", { class: "row" });
  #legend = el("p", { class: "legend" });
  #grid = el("cell-grid");
  #one = el("section", { "aria-label": "The selected cell" });
  #table = dataTable(() => this.#tableOf());
  /** @type {Shown} */
  #shown;

  build() {
    const meaning = note(
      "The {logit_lens} reads the {residual} after each layer as if it were the end. Each cell guesses " +
        "the token after its column.",
    );
    this.#buildForm();
    this.append(
      this.#answer,
      meaning,
      this.#form,
      this.#hint,
      this.#generated,
      this.#pager,
      this.#grid,
      this.#legend,
      this.#table,
      this.#one,
    );
    this.#grid.addEventListener("choose", ({ detail }) =>
      this.context.navigate({ row: String(detail.row), pos: String(this.#shown.first + detail.column) }),
    );
  }

  #buildForm() {
    const offersTuned = this.context.service.model?.capabilities.tuned_lens;
    this.#form.append(
      labelled("Also generate", this.#generate),
      " tokens",
      labelled("Follow the token", this.#token),
      el("button", { type: "submit" }, "Apply"),
      labelled("Cells show", this.#cells),
      offersTuned ? labelled("Lens", this.#lens) : "",
    );
    this.#token.addEventListener("input", () => this.#offerSpace());
    onSubmit(this.#form, () =>
      this.context.navigate({ generate: this.#generate.value, token: this.#token.value, pos: "", from: "" }),
    );
  }

  /** @type {Update<State>} */
  async update(state, signal) {
    if (!/^\d+$/.test(state.generate))
      throw new Error(
        `“${state.generate}” is not a number of tokens. Write 0, or how many tokens the model shall add.`,
      );
    this.#generate.value = state.generate;
    this.#token.value = state.token;
    this.#cells.value = state.cells;
    this.#lens.value = state.lens;
    const cells = readChoice(state.cells, "cells", CELLS);
    const given = readEdits(state.edits);
    const text = await this.#readText(state, given, signal);
    const { prompt, size, numGenerated } = text;
    const placed =
      numGenerated > 0 && Array.isArray(prompt) ? ofGeneration(given, prompt, size - numGenerated) : ofPrompt(given);
    const edits = placed.filter(({ stage }) => !BEHIND.test(stage));
    if (isOther(this.#shown?.state, state) && state.pos !== "" && !isPosition(state.pos, text.size))
      return this.context.navigate({ pos: "", from: "" }, { replace: true });
    const position = state.pos === "" ? text.size - 1 : readIndex(state.pos, "position", text.size);
    const first = this.#firstOf(state, position, text.size);
    const plainBody = this.#body(state, text.prompt, first, Math.min(this.#window, text.size - first));
    const body = edits.length > 0 ? { ...plainBody, edits } : plainBody;
    const answers = [body, ...(edits.length > 0 ? [plainBody] : [])].map((each) => cached("/attribute", each, signal));
    const [answer, plain = null] = await Promise.all(answers).finally(() => this.#offerSpace());
    const row = state.row === "" ? answer.layers.length - 1 : readIndex(state.row, "row", answer.layers.length);
    const isSame = this.#shown?.answer === answer && this.#shown.cells === cells;
    this.#shown = { state, body, answer, plain, first, row, position, cells, ...text };
    if (!isSame) this.#showGrid();
    this.#grid.select({ row, column: position - first });
    this.#showWords();
    this.#showOne();
    this.#showPager();
    this.#table.refresh();
    this.#offerSpace();
    return undefined;
  }

  /** How many positions are shown at once. */
  get #window() {
    return Math.max(WINDOW, this.#grid.room);
  }

  /** If the grid has the typed token only with a space in front, offer that token. */
  #offerSpace() {
    const field = this.#token;
    const layers = this.#shown?.answer.layers ?? [];
    const tops = layers.flatMap(({ positions }) => positions.flatMap(({ top }) => top));
    const typed = field.value;
    const spaced =
      /^[ ␣]?$|^[ ␣]/.test(typed) || tops.some(({ text }) => text === typed)
        ? undefined
        : tops.find(({ text }) => text === ` ${typed}`);
    const follow = () => {
      field.value = ` ${typed}`;
      this.#form.requestSubmit();
    };
    this.#hint.replaceChildren(spaced ? didYouMean(spaced, follow, " The grid has this token.") : "");
    this.#hint.hidden = spaced === undefined;
  }

  request() {
    return this.#shown && { path: "/attribute", body: this.#shown.body };
  }

  pictures() {
    return this.#shown ? [{ name: "logit lens", element: this.#grid.picture() }] : [];
  }

  /**
   * The tokens to look at.
   * @param {State} state
   * @param {Edit[]} edits
   * @param {AbortSignal} signal
   * @returns {Promise<Text>}
   */
  async #readText(state, edits, signal) {
    const { prompt, generate } = state;
    if (generate !== "0") {
      const body = {
        ...bodyOf(state),
        max_tokens: Number(generate),
        temperature: 0,
        echo: true,
        ...(edits.length > 0 && { edits }),
      };
      const { tokens, usage } = await cached("/generate", body, signal);
      return { prompt: tokens, size: tokens.length, numGenerated: tokens.length - usage.prompt_tokens };
    }
    const size = Array.isArray(prompt) ? prompt.length : (await cached("/tokenize", { text: prompt }, signal)).count;
    return { prompt, size, numGenerated: 0 };
  }

  /**
   * @param {State} state
   * @param {number} position
   * @param {number} size
   */
  #firstOf({ from }, position, size) {
    const latest = Math.max(0, size - this.#window);
    const first = from === "" ? latest : readIndex(from, "position", size);
    return position < first || position >= first + this.#window
      ? Math.min(latest, Math.max(0, position - Math.floor(this.#window / 2)))
      : first;
  }

  /**
   * @param {State} state
   * @param {Prompt} prompt
   * @param {number} first
   * @param {number} size
   */
  #body({ model, token, lens }, prompt, first, size) {
    const { capabilities, sizes } = this.model;
    // Labels of tokens show a space as ␣, so a copied label means a space.
    const followed =
      token === ""
        ? {}
        : { token: capabilities.tokenizer ? token.replaceAll("␣", " ") : readIndex(token, "token", sizes.d_vocab) };
    const positions = Array.from({ length: size }, (_, index) => first + index);
    return {
      method: "logit_lens",
      ...bodyOf({ model, prompt }),
      positions,
      top_k: Math.min(NUM_TOKENS, sizes.d_vocab),
      ...followed,
      ...(lens ? { lens } : {}),
    };
  }

  /**
   * The token whose rank is shown at a column, and its track through the rows.
   * @param {number} column
   */
  #followed(column) {
    const { token, final, layers } = this.#shown.answer;
    return {
      token: token ?? final[column],
      track: layers.map((layer) => (token && layer.token ? layer.token : layer.final)[column]),
    };
  }

  #showGrid() {
    const { answer, first, cells, size, numGenerated } = this.#shown;
    const { sizes } = this.model;
    const columns = answer.layers[0].positions.map(({ position }) => {
      const isGenerated = position >= size - numGenerated;
      const label = `${position} ${shown(answer.tokens[position])}`;
      return {
        label: isGenerated ? `+${label}` : label,
        title: `position ${label}${isGenerated ? ", generated" : ""}`,
        mark: isGenerated,
      };
    });
    const tracks = columns.map((_, column) => this.#followed(column));
    const rows = answer.layers.map((layer, row) => {
      const name = rowName(row, answer.layers.length);
      const drawn = layer.positions.map(({ top: [best] }, column) => {
        const before = this.#plainBest(row, column);
        const isChanged = before !== null && before.id !== best.id;
        const { token, track } = tracks[column];
        const { rank, probability } = track[row];
        const piece = best.text?.includes(PIECE) ? " (a piece of a character)" : "";
        const says =
          `${name}, position ${first + column}: most likely ${quoted(best)}${piece}, id ${best.id}, ` +
          `${percent(best.probability)}; rank of ${quoted(token)}: ${count(rank)}, probability ` +
          `${chance(probability)}${isChanged ? `; without the edits: ${quoted(before)}` : ""}`;
        const texts = {
          token: { text: shown(best), small: percent(best.probability), share: best.probability ?? 0 },
          rank: { text: count(rank), small: shown(token), share: 1 - Math.log1p(rank) / Math.log(sizes.d_vocab) },
          probability: { text: chance(probability), small: shown(token), share: probability ?? 0 },
        };
        return { ...texts[cells], strong: cells === "token" ? best.id === token.id : rank === 0, isChanged, says };
      });
      return { label: name, title: layer.stage, cells: drawn };
    });
    this.#grid.show({ label: `Logit lens: ${CELLS[cells]} after each layer, at each position`, columns, rows });
    this.#showLegend();
  }

  /**
   * The most likely token of a cell without the edits; null if there are none.
   * @param {number} row
   * @param {number} column
   */
  #plainBest(row, column) {
    return this.#shown.plain?.layers[row].positions[column].top[0] ?? null;
  }

  /** How many cells the edits change. */
  #changed() {
    const { answer, plain } = this.#shown;
    if (plain === null) return "";
    const changed = answer.layers.map(({ positions }, row) =>
      positions.filter(({ top: [best] }, column) => this.#plainBest(row, column)?.id !== best.id),
    );
    const number = changed.flat().length;
    const [rows, size] = [changed.length, changed.length * answer.layers[0].positions.length];
    const first = changed.findIndex((cells) => cells.length > 0);
    return number === 0
      ? " The edits change the most likely token of no cell."
      : ` The edits change the most likely token of ${count(number)} of ${count(size)} cells, the first ` +
          `${rowName(first, rows)} (underlined).`;
  }

  #showLegend() {
    const { answer, cells } = this.#shown;
    const followed = answer.token ? quoted(answer.token) : "the final prediction";
    const colours = {
      token: ["Colour: its probability ", barLegend("0 %", "100 %"), `. Bold: ${followed}.`],
      rank: [
        "Colour: rank, on a logarithmic scale ",
        barLegend(count(this.model.sizes.d_vocab - 1), "0"),
        `. The rank counts the tokens that are more likely than ${followed}. Rank 0 (bold): none.`,
      ],
      probability: [
        "Colour: probability of the followed token ",
        barLegend("0 %", "100 %"),
        `: ${followed}. Bold: it is the most likely one.`,
      ],
    };
    const hasPieces =
      cells === "token" &&
      answer.layers.some(({ positions }) => positions.some(({ top: [best] }) => best.text?.includes(PIECE)));
    const notes = [
      " Temperature 1, whole vocabulary.",
      hasPieces && ` ${PIECE}: a token that is a piece of a character.`,
      answer.layers.some(({ translated }) => translated) && " The residuals are translated by a tuned lens.",
      readEdits(this.#shown.state.edits).some(({ stage }) => BEHIND.test(stage)) &&
        " Edits of the last norm and of the logits are left out: the lens decodes the residuals before them.",
    ];
    this.#legend.replaceChildren(...colours[cells], ...notes.filter((each) => each !== false));
  }

  #showWords() {
    const { answer, position, first, numGenerated, size } = this.#shown;
    const { token, track } = this.#followed(position - first);
    this.#answer.textContent = whereItWins(token, position, track) + this.#changed();
    this.#generated.hidden = numGenerated === 0;
    const added = answer.tokens.slice(size - numGenerated);
    this.#generated.textContent =
      `The model added ${numGenerated} ${numGenerated === 1 ? "token" : "tokens"}, the most likely one each time ` +
      `(“+”): ${added.map(quoted).join(" ")}. The column before each shows how the network found it.`;
  }

  #showOne() {
    const { answer, position, first, row } = this.#shown;
    const { token, track } = this.#followed(position - first);
    const { top } = answer.layers[row].positions[position - first];
    const before = this.#plainBest(row, position - first);
    this.#one.replaceChildren(
      el("h3", {}, `Position ${position} (${shown(answer.tokens[position])}), ${rowName(row, answer.layers.length)}`),
      el(
        "p",
        {},
        `${quoted(token)} has rank ${count(track[row].rank)} here, and a probability of ` +
          `${chance(track[row].probability)}.` +
          (before ? ` Without the edits, ${quoted(before)} is the most likely (${percent(before.probability)}).` : ""),
      ),
      el(
        "div",
        { class: "beside" },
        predictionTable(`The ${top.length} most likely tokens.`, top, token.id),
        el(
          "div",
          { class: "compact" },
          barTable({
            caption: `${quoted(token)} through the layers. Rank 0: the most likely token.`,
            columns: ["layer", "rank", "probability"],
            rows: track.map((each, index) => ({
              cells: [rowName(index, track.length), count(each.rank), chance(each.probability)],
              shares: [each.probability],
              mark: index === row,
            })),
          }),
        ),
      ),
    );
  }

  #showPager() {
    const { first, size } = this.#shown;
    const go = (/** @type {number} */ to) => {
      const from = Math.min(to, size - this.#window);
      return this.context.navigate({ from: String(from), pos: String(from + this.#window - 1) });
    };
    this.#pager.hidden = size <= this.#window;
    const page = { from: first, size: this.#window, total: size };
    this.#pager.replaceChildren(...pager("positions", page, go));
  }

  #tableOf() {
    const { answer } = this.#shown;
    const numRows = answer.layers.length;
    return {
      caption:
        "The most likely token of each residual (rows) at each position (columns), its probability, and the rank " +
        "of the followed token (0: the most likely)",
      columns: [
        "layer",
        ...answer.layers[0].positions.map(({ position }) => `${position} ${shown(answer.tokens[position])}`),
      ],
      rows: answer.layers.map((layer, row) => [
        rowName(row, numRows),
        ...layer.positions.map(
          ({ top: [best] }, column) =>
            `${shown(best)} ${percent(best.probability)}, rank ${count(this.#followed(column).track[row].rank)}`,
        ),
      ]),
    };
  }
}

customElements.define("lens-view", Lens);
