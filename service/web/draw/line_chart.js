// Numbers over the last seconds as lines, in SVG.

import { el, svg } from "../dom.js";
import { number } from "../format.js";

const [WIDTH, HEIGHT, LEFT, BOTTOM, TOP] = [600, 180, 52, 24, 8];
const DASHES = ["none", "6 4", "2 3"]; // lines differ by more than their colour

/** @typedef {{ x: number, y: number }} Point */

/**
 * <line-chart>. `series`: the names of the lines. `show(lines)`: for each, points {x, y}; x is in seconds, 0 is now.
 */
export class LineChart extends HTMLElement {
  #chart;
  #picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", class: "line-chart", "font-size": 12 });

  /** @param {{ label: string, seconds: number, series: string[] }} chart */
  constructor(chart) {
    super();
    this.#chart = chart;
  }

  connectedCallback() {
    if (this.childElementCount > 0) return;
    const key = this.#chart.series.map((name, index) =>
      el(
        "span",
        { class: "row" },
        svg(
          "svg",
          { width: 40, height: 12, "aria-hidden": "true", class: "line-chart-key" },
          line(`M 0 6 H 40`, index),
        ),
        name,
      ),
    );
    this.append(this.#picture, el("p", { class: "legend row" }, key));
  }

  picture() {
    return this.#picture;
  }

  /** @param {Point[][]} lines */
  show(lines) {
    const { label, seconds: shown, series } = this.#chart;
    const highest = rounded(Math.max(1, ...lines.flat().map(({ y }) => y)));
    const [x, y] = [
      (/** @type {number} */ seconds) => LEFT + (WIDTH - LEFT - 4) * (1 + seconds / shown),
      (/** @type {number} */ value) => HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (value / highest),
    ];
    const grid = [0, highest / 2, highest].map((value) => [
      svg("path", { d: `M ${LEFT} ${y(value)} H ${WIDTH - 4}`, stroke: "currentColor", "stroke-width": 0.3 }),
      text(LEFT - 6, y(value) + 4, value.toLocaleString("en"), "end"),
    ]);
    const times = [-shown, -shown / 2, 0].map((seconds) =>
      text(
        x(seconds),
        HEIGHT - 6,
        seconds === 0 ? "now" : `${-seconds} s ago`,
        seconds === 0 ? "end" : seconds === -shown ? "start" : "middle",
      ),
    );
    const paths = lines.map((points, index) =>
      line(
        points
          .map((point, at) => `${at === 0 ? "M" : "L"} ${x(point.x).toFixed(1)} ${y(point.y).toFixed(1)}`)
          .join(" "),
        index,
      ),
    );
    this.#picture.replaceChildren(...grid.flat(), ...times, ...paths);
    const newest = lines.map((points, index) => `${series[index]} ${number(points.at(-1)?.y)}`).join(", ");
    this.#picture.setAttribute("aria-label", `${label}. Now: ${newest}.`);
  }
}

/**
 * @param {string} d
 * @param {number} index
 */
function line(d, index) {
  return svg("path", { d, fill: "none", class: `line-${index}`, "stroke-width": 2, "stroke-dasharray": DASHES[index] });
}

/**
 * @param {number} x
 * @param {number} y
 * @param {string} content
 * @param {"start" | "middle" | "end"} anchor
 */
function text(x, y, content, anchor) {
  return svg("text", { x, y, "text-anchor": anchor, fill: "currentColor" }, content);
}

/**
 * The next number of the form 1, 2 or 5 times a power of ten.
 * @param {number} value
 */
function rounded(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * ([1, 2, 5].find((factor) => factor * power >= value) ?? 10);
}

customElements.define("line-chart", LineChart);
