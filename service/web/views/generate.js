// Generate: the continuation of a prompt as a stream, each token coloured by its probability.

import { ApiError, isAbort, postJson, postStream } from "../api.js";
import { actionButton, el, labelled } from "../dom.js";
import { barLegend } from "../draw/bars.js";
import { dataTable } from "../draw/data_table.js";
import "../draw/token_strip.js";
import { count, percent, quoted, shown } from "../format.js";
import { SAMPLING, SamplingControls, eachSetting, nameAndValue, numeric } from "../sampling_controls.js";
import { withTerms } from "../terms.js";
import { View } from "../view.js";
import { entryOf, firstDifference, readToken, switchedOff } from "./continuation.js";
import { readEdits } from "./edit_words.js";
import { TokenPanel } from "./token_panel.js";

/**
 * @import { FinishReason, Logprob, Usage } from "../answers.js"
 * @import { Texts } from "../sampling_controls.js"
 * @import { Update, ViewState } from "../view.js"
 * @import { Generated } from "./token_panel.js"
 * @typedef {ViewState & typeof GenerateView.params} State
 *
 * A continuation. `end`: the last event of the service, or why there is none; null while it runs.
 * @typedef {{
 *   key: string, body: Record<string, unknown> | null, promptIds: number[] | null, tokens: Generated[], text: string,
 *   end: { finish_reason: FinishReason, usage?: Usage } | "stopped" | "failed" | null, stopper: AbortController,
 *   promise: Promise<void>,
 * }} Run
 */

const NUM_ALTERNATIVES = 10;
const ENDS = {
  length: "“Max tokens” was reached",
  stop: "the model ended the text",
  cancelled: "the service ended the request",
  error: "an error ended the text",
};

export default class GenerateView extends View {
  static appliesEdits = true;
  static params = {
    edits: "[]",
    temperature: "0",
    top_k: "",
    top_p: "",
    seed: "0",
    max_tokens: "24",
    chat: "",
    numbers: "",
    token: "",
    try_temperature: "",
    try_top_k: "",
    try_top_p: "",
  };

  /** @type {State} */
  #state;
  /** @type {{ prompt: string, said: string, isNew: boolean } | null} what the last "Continue" did */
  #continued = null;
  /** @type {Run | null} the continuation that is shown */
  #run = null;
  #lastState = "";
  #source = ""; // what the continuation follows: [model, prompt, chat] as JSON
  #controls = new SamplingControls({
    said: "for the generation",
    onChange: (values) => this.context.navigate({ ...values, token: "" }),
  });
  #maxTokens = this.#box("max_tokens", 1);
  #seed = this.#box("seed", 0);
  #chat = this.#check("chat", { token: "" });
  #numbers = this.#check("numbers", {});
  #stop = actionButton("Stop", () => this.#run?.stopper.abort(), { disabled: true });
  #status = el("p", { class: "status-line", role: "status" });
  #notice = el("p", { role: "status", tabindex: "-1", hidden: true });
  #summary = el("summary", {});
  #room = el("span", { class: "faint" });
  #before = el("span", { class: "prompt-text" });
  #strip = el("token-strip");
  #difference = el("p", { class: "answer", role: "status" });
  #plain = el("text-continuation", { heading: "Without the edits" });
  #card = el("div", { class: "card generated" }, this.#before, this.#strip);
  #sent = el("pre", { class: "code", tabindex: "0" });
  #rendered = el(
    "details",
    { hidden: true },
    el("summary", {}, "What is sent: the prompt in the chat template"),
    this.#sent,
  );
  #chatLabel = el("label", {}, this.#chat, " As a chat message");
  /** @type {HTMLDetailsElement} */
  #details;
  #panel = new TokenPanel({ onTry: (values) => this.#try(values), onContinue: (token) => this.#continueWith(token) });
  #table = dataTable(() => this.#tableOf(), "Show the tokens as a table");

  build() {
    this.#strip.addEventListener("choose", ({ detail }) => this.context.navigate({ token: String(detail.index) }));
    const { model } = this.context.service;
    const hasTemplate = Boolean(model?.capabilities.chat_template);
    const defaults = model?.generation_defaults ?? {};
    const off = Object.keys(switchedOff(defaults)).map((name) => `${name} ${defaults[name]}`);
    this.#details = el(
      "details",
      { class: "settings", open: !matchMedia("(max-width: 40rem)").matches },
      this.#summary,
      this.#controls.element,
      el(
        "div",
        { class: "row" },
        el("span", {}, labelled("Max tokens", this.#maxTokens), " ", this.#room),
        el("label", {}, "Seed ", this.#seed),
        actionButton("New seed", () =>
          this.context.navigate({ seed: String(crypto.getRandomValues(new Uint32Array(1))[0]), token: "" }),
        ),
        actionButton("Use the model's defaults", () => this.#useDefaults()),
        this.#chatLabel,
        el("label", {}, this.#numbers, " Probabilities below the tokens"),
      ),
      el(
        "p",
        { class: "faint" },
        withTerms("Temperature 0 always gives the same text ({greedy}). Above 0, the {seed} decides."),
        off.length > 0 && ` The model's own ${off.join(" and ")} ${off.length > 1 ? "are" : "is"} switched off here.`,
      ),
      el(
        "p",
        { class: "faint", hidden: !hasTemplate },
        "“As a chat message” puts the prompt into the chat template of the model.",
      ),
    );
    this.append(
      this.#details,
      el("div", { class: "row run-line" }, this.#stop, this.#status),
      this.#notice,
      this.#rendered,
      this.#card,
      el(
        "p",
        { class: "legend" },
        withTerms("{probability|Probability} of the {token} (temperature 1, all tokens): "),
        barLegend("0 %", "100 %"),
      ),
      this.#table,
      this.#panel.element,
    );
    this.#chatLabel.hidden = !hasTemplate;
  }

  /** @type {Update<State>} */
  async update(state, signal) {
    this.#state = state;
    this.#fill(state);
    this.#showNotice(state);
    const key = JSON.stringify([state.model, state.prompt, this.#settings(state), state.chat, state.edits]);
    const isResubmitted = JSON.stringify(state) === this.#lastState;
    this.#lastState = JSON.stringify(state);
    const before = this.#run;
    const isKept = before?.key === key && before.end !== "failed" && !(isResubmitted && before.end !== null);
    const run = isKept ? before : this.#start(key, state);
    try {
      await Promise.all([run.promise, this.#choose(state, run, signal)]);
    } catch (error) {
      if (error instanceof ApiError) this.#mark(error.param);
      throw error;
    }
  }

  /**
   * Bring the field that an error concerns into sight, and mark it.
   * @param {string | null} name
   */
  #mark(name) {
    const field = name === "max_tokens" ? this.#maxTokens : name === "seed" ? this.#seed : undefined;
    if (!field && !SAMPLING.some((one) => one.name === name)) return;
    this.#details.open = true;
    field?.setAttribute("aria-invalid", "true");
    (field ?? this.#controls.element).scrollIntoView({ block: "nearest" });
  }

  leave() {
    this.#run?.stopper.abort();
  }

  request() {
    return this.#run?.body ? { path: "/generate", body: { ...this.#run.body, stream: true } } : null;
  }

  /** The prompt and its continuation, or the answer alone if the prompt was a chat message or token ids. */
  text() {
    if (!this.#run?.text) return null;
    const { key, text } = this.#run;
    const [, prompt, , chat] = JSON.parse(key);
    return chat || typeof prompt !== "string" ? text : prompt + text;
  }

  pictures() {
    return this.#run?.tokens.length ? [{ name: "tokens", element: this.#strip }] : [];
  }

  /**
   * Begin a new continuation, and end the one before.
   * @param {string} key
   * @param {State} state
   */
  #start(key, state) {
    this.#run?.stopper.abort();
    const [stopper, promise] = [new AbortController(), Promise.resolve()];
    /** @type {Run} */
    const run = { key, body: null, promptIds: null, tokens: [], text: "", end: null, stopper, promise };
    this.#run = run;
    this.#strip.reset("The continuation, token by token");
    const source = JSON.stringify([state.model, state.prompt, state.chat]);
    if (this.#source !== source) this.#showRoom(null);
    this.#source = source;
    this.#before.textContent = typeof state.prompt === "string" ? state.prompt : `Token ids ${state.prompt.join(", ")}`;
    this.#stop.disabled = false;
    this.#panel.clear();
    this.#table.refresh();
    run.promise = this.#stream(run, state).finally(() => {
      if (run === this.#run) this.#finish(run);
    });
    run.promise.catch(() => {}); // `update` awaits it and reports its error
    return run;
  }

  /**
   * @param {Run} run
   * @param {State} state
   */
  async #stream(run, state) {
    const { signal } = run.stopper;
    const edits = readEdits(state.edits);
    this.#difference.textContent = "";
    this.#plain.clear();
    if (edits.length > 0) this.#card.after(this.#difference, this.#plain);
    else for (const part of [this.#difference, this.#plain]) part.remove();
    try {
      if (state.chat) {
        const messages = [{ role: "user", content: state.prompt }];
        const { tokens } = await postJson("/tokenize", { messages }, signal); // with the chat template of the model
        run.promptIds = tokens.map((token) => token.id);
        this.#sent.textContent = tokens.map((token) => token.text ?? shown(token)).join("");
      }
      const body = {
        ...(state.model && { model: state.model }),
        prompt: state.chat ? run.promptIds : state.prompt,
        ...this.#settings(state),
      };
      run.body = edits.length > 0 ? { ...body, edits } : body;
      const started = performance.now();
      for await (const event of postStream("/generate", run.body, signal)) {
        run.text += event.text ?? "";
        if (event.finish_reason) run.end = { finish_reason: event.finish_reason, usage: event.usage };
        else if (event.token) {
          const entry = readToken(event.token, event.text ?? "");
          run.tokens.push(entry);
          if (run === this.#run) this.#strip.add(entryOf(entry));
        }
        if (run === this.#run) this.#say(run, performance.now() - started);
      }
      if (edits.length === 0 || run !== this.#run) return;
      await this.#plain.stream(body, signal);
      const { index, said } = firstDifference(run.tokens, this.#plain.tokens);
      this.#plain.strip.mark(index);
      this.#difference.textContent = said;
    } catch (error) {
      run.end = isAbort(error) ? "stopped" : "failed";
      if (run.end === "failed") throw error;
    }
  }

  /**
   * @param {Run} run
   * @param {number} milliseconds
   */
  #say(run, milliseconds) {
    const number = count(run.tokens.length);
    const unit = run.tokens.length === 1 ? "token" : "tokens";
    const seconds = (milliseconds / 1000).toFixed(2);
    this.#status.textContent =
      run.end === null || typeof run.end === "string"
        ? `${number} ${unit} …`
        : `${number} ${unit} in ${seconds} s: ${ENDS[run.end.finish_reason]}.`;
  }

  /** @param {Run} run */
  #finish(run) {
    this.#stop.disabled = true;
    if (run.end === "stopped") this.#status.textContent = `Stopped after ${count(run.tokens.length)} tokens.`;
    if (run.end === "failed") this.#status.textContent = "";
    this.#table.refresh();
    const usage = typeof run.end === "object" ? run.end?.usage : undefined;
    this.#showRoom(usage?.prompt_tokens ?? null);
  }

  /**
   * How many tokens fit after the prompt. `numPrompt`: null if a run has not said yet how many tokens the prompt has.
   * @param {number | null} numPrompt
   */
  #showRoom(numPrompt) {
    const { max_positions: places } = this.model.limits;
    if (!places) return;
    this.#maxTokens.max = String(places - (numPrompt ?? 1));
    this.#room.textContent =
      numPrompt === null
        ? `at most ${count(places)} with the prompt`
        : `at most ${count(places - numPrompt)} (context ${count(places)} − prompt ${count(numPrompt)})`;
  }

  /**
   * The token ids of the prompt, which the text before a token begins with.
   * @param {Run} run
   * @param {State} state
   * @param {AbortSignal} signal
   */
  async #readPromptIds(run, state, signal) {
    if (Array.isArray(state.prompt)) run.promptIds ??= state.prompt;
    run.promptIds ??= (await postJson("/tokenize", { text: state.prompt }, signal)).tokens.map((token) => token.id);
    return run.promptIds;
  }

  /**
   * Show the alternatives to the chosen token.
   * @param {State} state
   * @param {Run} run
   * @param {AbortSignal} signal
   */
  async #choose(state, run, signal) {
    this.#strip.mark(null);
    if (state.token === "") return this.#panel.clear();
    const index = Number(state.token);
    if (!run.tokens[index]) await run.promise;
    if (signal.aborted) return undefined;
    const token = run.tokens[index];
    if (!token)
      throw new Error(
        `The continuation has no token ${state.token}: in the address, its ${count(run.tokens.length)} tokens are ` +
          "counted from 0.",
      );
    this.#strip.mark(index);
    const used = this.#used(state);
    const wasGreedy = Number(used.temperature) === 0;
    const start = wasGreedy ? { ...used, temperature: "1" } : used; // 0 leaves one token
    const ids = [...(await this.#readPromptIds(run, state, signal)), ...run.tokens.slice(0, index).map(({ id }) => id)];
    return this.#panel.show(
      {
        model: state.model,
        ids,
        token,
        index,
        wasGreedy,
        tried: eachSetting(({ name }) => state[`try_${name}`] || start[name]), // what the sliders show
        canContinue: !state.chat && typeof state.prompt === "string",
      },
      signal,
    );
  }

  /**
   * The fields of the request that the controls decide.
   * @param {State} state
   */
  #settings(state) {
    const defaults = this.model.generation_defaults;
    /** @type {(keyof Texts | "max_tokens" | "seed")[]} */
    const names = [...SAMPLING.map(({ name }) => name), "max_tokens", "seed"];
    const given = names.filter((name) => state[name] !== "");
    return {
      ...Object.fromEntries(given.map((name) => [name, numeric(state[name])])),
      ...switchedOff(defaults),
      logprobs: Math.min(NUM_ALTERNATIVES, this.model.config.vocab_size),
    };
  }

  /**
   * The texts of the sampling controls: those of the address, else what the model says, else off.
   * @param {State} state
   */
  #used(state) {
    const defaults = this.model.generation_defaults;
    return eachSetting(({ name, off }) => (state[name] !== "" ? state[name] : String(defaults[name] ?? off)));
  }

  /** @param {Texts} values */
  #try(values) {
    this.context.navigate(Object.fromEntries(Object.entries(values).map(([name, text]) => [`try_${name}`, text])), {
      replace: true,
    });
  }

  /** @param {Logprob} token */
  #continueWith(token) {
    const before = (this.#run?.tokens ?? [])
      .slice(0, Number(this.#state.token))
      .map(({ text }) => text ?? "")
      .join("");
    const prompt = `${this.#state.prompt}${before}${token.text}`;
    this.#continued = {
      prompt,
      said: `The prompt now goes on to ${quoted(token)}, and the model continues from there. Back undoes this.`,
      isNew: true,
    };
    this.context.navigate({ prompt, token: "" });
  }

  /** @param {State} state */
  #fill(state) {
    const used = this.#used(state);
    this.#controls.show(used);
    for (const field of [this.#maxTokens, this.#seed]) field.removeAttribute("aria-invalid");
    const drawn =
      Number(used.temperature) === 0
        ? ["temperature 0"]
        : [...SAMPLING.map((one) => nameAndValue(one, used[one.name])), `seed ${state.seed}`];
    this.#summary.textContent = `Settings: ${drawn.join(", ")}, at most ${state.max_tokens} tokens`;
    if (document.activeElement !== this.#maxTokens) this.#maxTokens.value = state.max_tokens;
    if (document.activeElement !== this.#seed) this.#seed.value = state.seed;
    this.#chat.checked = state.chat !== "";
    this.#numbers.checked = state.numbers !== "";
    this.#strip.classList.toggle("with-numbers", state.numbers !== "");
    this.#rendered.hidden = state.chat === "";
  }

  /**
   * Say what "Continue" did, as long as its prompt is shown.
   * @param {State} state
   */
  #showNotice(state) {
    const continued = this.#continued?.prompt === state.prompt ? this.#continued : null;
    this.#notice.hidden = continued === null;
    this.#notice.textContent = continued?.said ?? "";
    if (!continued?.isNew) return;
    continued.isNew = false;
    this.#notice.focus(); // the button that had it is gone
  }

  /**
   * @param {"max_tokens" | "seed"} name
   * @param {number} min
   */
  #box(name, min) {
    return el("input", {
      type: "number",
      min,
      step: 1,
      class: "short",
      onchange: ({ target }) => this.context.navigate({ [name]: target.value, token: "" }),
    });
  }

  /**
   * @param {"chat" | "numbers"} name
   * @param {{ token?: string }} others
   */
  #check(name, others) {
    const box = el("input", { type: "checkbox" });
    box.addEventListener("change", () => this.context.navigate({ [name]: box.checked ? "1" : "", ...others }));
    return box;
  }

  #useDefaults() {
    const defaults = this.model.generation_defaults;
    this.context.navigate({ ...eachSetting(({ name, off }) => String(defaults[name] ?? off)), token: "" });
  }

  #tableOf() {
    const rows = (this.#run?.tokens ?? []).map((token, index) => [
      String(index + 1),
      shown(token),
      String(token.id),
      percent(token.probability),
      shown(token.top[0]),
    ]);
    return {
      caption: "The tokens of the continuation, counted from 1",
      columns: ["number", "token", "id", "probability", "most likely token"],
      rows,
    };
  }
}

customElements.define("generate-view", GenerateView);
