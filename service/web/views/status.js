// Status: the requests, the cache and the speed of the service, once a second.

import { getJson } from "../api.js";
import { el } from "../dom.js";
import { dataTable } from "../draw/data_table.js";
import { LineChart } from "../draw/line_chart.js";
import { bodyRow } from "../draw/tables.js";
import { count, percent } from "../format.js";
import { withTerms } from "../terms.js";
import { View } from "../view.js";

/**
 * @import { Status } from "../answers.js"
 * @import { Update, ViewState } from "../view.js"
 */

const INTERVAL_MILLISECONDS = 1000;
const SHOWN_SECONDS = 120;
const CACHE = "Tokens in the {kv_cache}"; // what the meter shows, too
/** What the table has, by label. @type {Record<string, (status: Status) => string>} */
const VALUES = {
  "Running requests": (status) => count(status.requests_running),
  "Waiting requests": (status) => count(status.requests_waiting),
  "Texts in the batch": (status) => `${count(status.sequences_running)} of at most ${count(status.max_sequences)}`,
  [CACHE]: ({ cache }) =>
    cache ? `${count(cache.used_tokens)} of ${count(cache.total_tokens)} (${percent(shareOf(cache))})` : "–",
  "Prompt tokens found in the cache": ({ cache }) =>
    cache ? `${count(cache.prompt_tokens_found)} of ${count(cache.prompt_tokens_looked_up)}` : "–",
  "Generated tokens a second": (status) => status.tokens_per_second.generated.toFixed(1),
  "Prompt tokens a second": (status) => status.tokens_per_second.prompt.toFixed(1),
  "Time since the start": (status) => duration(status.uptime_seconds),
  "Kernels that compute": (status) => status.kernels ?? "–",
  Version: (status) => status.version,
};

export default class StatusView extends View {
  static usesPrompt = false;

  /** @type {{ time: number, status: Status }[]} the answers of the last two minutes */
  #samples = [];
  /** @type {number | undefined} */
  #timer;
  /** @type {object | null} the last call of `#poll` */
  #turn = null;
  #values = el("tbody");
  #meter = el("meter", { min: 0, max: 1, "aria-label": "Share of the cache that is in use" });
  #answer = el("p", { class: "answer" });
  #window = el("p", { class: "faint" });
  #chart = new LineChart({
    label: "Tokens a second in the last two minutes",
    seconds: SHOWN_SECONDS,
    series: ["generated", "prompt"],
  });
  #table = dataTable(() => this.#tableOf());
  #onVisibility = () => (document.hidden ? clearTimeout(this.#timer) : this.#poll());

  build() {
    this.#values.append(
      ...Object.keys(VALUES).map((label) => bodyRow(withTerms(label), ["", label === CACHE && this.#meter])),
    );
    const caption = el("caption", {}, "Now, renewed every second");
    const values = el("table", { class: "status-values" }, caption, this.#values);
    const found = "The cache finds the beginning of a prompt if an earlier one had it, in whole blocks of 16 tokens.";
    this.append(
      this.#answer,
      el(
        "div",
        { class: "beside" },
        el("div", {}, values, this.#window, el("p", { class: "faint" }, found)),
        el("div", {}, el("h3", {}, "Tokens a second"), this.#chart, this.#table),
      ),
    );
  }

  /** @type {Update<ViewState>} */
  async update(_state, signal) {
    document.addEventListener("visibilitychange", this.#onVisibility);
    this.#turn = null;
    await this.#read(signal);
    this.#wait();
  }

  leave() {
    document.removeEventListener("visibilitychange", this.#onVisibility);
    this.#turn = null;
    clearTimeout(this.#timer);
  }

  request() {
    return { path: "/status", body: null };
  }

  pictures() {
    return [{ name: "tokens a second", element: this.#chart }];
  }

  /** Ask again in a second. */
  #wait() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#poll(), INTERVAL_MILLISECONDS);
  }

  /** Ask now, and again a second after the answer, so that a slow service never has two requests of this view. */
  async #poll() {
    const turn = (this.#turn = {});
    clearTimeout(this.#timer);
    const error = await this.#read().catch((reason) => reason);
    if (turn !== this.#turn || !this.isConnected || document.hidden) return; // another turn goes on, or none
    if (error === undefined) this.#wait();
    else this.context.report(error);
  }

  /** @param {AbortSignal} [signal] */
  async #read(signal) {
    const status = await getJson("/status", signal);
    const time = performance.now() / 1000;
    this.#samples = [...this.#samples.filter((sample) => sample.time > time - SHOWN_SECONDS), { time, status }];
    this.#show(status, time);
  }

  /**
   * @param {Status} status
   * @param {number} now
   */
  #show(status, now) {
    const { cache, tokens_per_second: speed } = status;
    const share = shareOf(cache);
    this.#answer.textContent = sentence(status);
    Object.values(VALUES).forEach((read, row) => (this.#values.rows[row].cells[1].textContent = read(status)));
    this.#window.textContent =
      `Rates: means over the last ${speed.window_seconds.toFixed(1)} seconds. A prompt counts with its first ` +
      "generated token.";
    this.#meter.value = share;
    this.#meter.textContent = percent(share);
    const points = (/** @type {(status: Status) => number} */ read) =>
      this.#samples.map(({ time, status: each }) => ({ x: time - now, y: read(each) }));
    this.#chart.show([
      points((each) => each.tokens_per_second.generated),
      points((each) => each.tokens_per_second.prompt),
    ]);
    this.#table.refresh();
  }

  #tableOf() {
    const newest = this.#samples.at(-1)?.time ?? 0;
    const rows = this.#samples
      .toReversed()
      .map(({ time, status }) => [
        `${(newest - time).toFixed(0)} s ago`,
        count(status.requests_running),
        count(status.requests_waiting),
        count(status.cache?.used_tokens ?? 0),
        status.tokens_per_second.generated.toFixed(1),
        status.tokens_per_second.prompt.toFixed(1),
      ]);
    return {
      caption: "The last two minutes, the newest first",
      columns: ["time", "running", "waiting", "cache tokens", "generated tokens/s", "prompt tokens/s"],
      rows,
    };
  }
}

/** The share of the cache that is in use. @param {Status["cache"]} cache */
const shareOf = (cache) => (cache ? cache.used_tokens / cache.total_tokens : 0);

/**
 * Whether the service is busy.
 * @param {Status} status
 */
function sentence({ requests_running: running, requests_waiting: waiting }) {
  if (running + waiting === 0) return "The service is idle.";
  const requests = (/** @type {number} */ number) => `${count(number)} ${number === 1 ? "request" : "requests"}`;
  return `The service is busy: ${requests(running)} running, ${count(waiting)} waiting.`;
}

/**
 * Seconds as the two largest units.
 * @param {number} seconds
 */
function duration(seconds) {
  const [days, hours, minutes] = [
    Math.floor(seconds / 86400),
    Math.floor(seconds / 3600) % 24,
    Math.floor(seconds / 60) % 60,
  ];
  if (days > 0) return `${days} d ${hours} h`;
  if (hours > 0) return `${hours} h ${minutes} min`;
  return minutes > 0 ? `${minutes} min ${Math.floor(seconds) % 60} s` : `${Math.floor(seconds)} s`;
}

customElements.define("status-view", StatusView);
