// Colour maps for numbers. Both can be told apart by people who are colour-blind, and in both the strongest colour
// means the largest size: near zero, a cell has nearly the colour of the page.

import { el } from "../dom.js";
import { isDark } from "../theme.js";

/**
 * @typedef {[red: number, green: number, blue: number]} Colour
 * @typedef {"sequential" | "diverging"} ColourMap
 * @typedef {{ map: ColourMap, low: number, high: number, ends?: string[] }} Scale `ends`: texts for the legend
 */

const channels = (/** @type {string} */ hex) =>
  /** @type {Colour} */ ([1, 3, 5].map((from) => Number.parseInt(hex.slice(from, from + 2), 16)));
/** The colours of each map, at equal distances. @type {Record<ColourMap, Record<"light" | "dark", Colour[]>>} */
const STOPS = {
  sequential: {
    light: ["#f7fbff", "#c6dbef", "#6baed6", "#2171b5", "#08306b"].map(channels),
    dark: ["#141a22", "#173c68", "#236eaa", "#5aaad7", "#def0fc"].map(channels),
  },
  diverging: {
    light: ["#aa3404", "#f07c28", "#fed4aa", "#f7f8fa", "#b8d2ee", "#4a8cd0", "#104284"].map(channels),
    dark: ["#ffce96", "#ee842e", "#703e16", "#161c25", "#1c426e", "#4290dc", "#badeff"].map(channels),
  },
};

/**
 * The colour of a share from 0 to 1 on a map: "sequential", or "diverging" (0.5 is zero).
 * @param {number} share
 * @param {ColourMap} map
 * @returns {Colour}
 */
export function colour(share, map = "sequential") {
  const stops = STOPS[map][isDark() ? "dark" : "light"];
  const place = Math.min(Math.max(share, 0), 1) * (stops.length - 1);
  const index = Math.min(Math.floor(place), stops.length - 2);
  const between = (/** @type {number} */ value, /** @type {number} */ next) =>
    Math.round(value + (place - index) * (next - value));
  const [[red, green, blue], next] = [stops[index], stops[index + 1]];
  return [between(red, next[0]), between(green, next[1]), between(blue, next[2])];
}

/** Map and theme → 256 colours as pixels. @type {Record<string, Uint32Array>} */
const pixels = {};

/**
 * 256 colours of a map as the 32 bits of an opaque pixel, in the order of bytes of this machine.
 * @param {ColourMap} map
 */
export function pixelColours(map) {
  const key = `${map} ${isDark() ? "dark" : "light"}`;
  if (!pixels[key]) {
    const bytes = Array.from({ length: 256 }, (_, index) => [...colour(index / 255, map), 255]);
    pixels[key] = new Uint32Array(Uint8Array.from(bytes.flat()).buffer);
  }
  return pixels[key];
}

/**
 * A bar with the colours of a map, for a legend. It follows the theme.
 * @param {ColourMap} map
 */
export function legendBar(map) {
  const { light, dark } = STOPS[map];
  const stops = light.map((each, index) => `light-dark(${css(each)}, ${css(dark[index])})`);
  const style = { backgroundImage: `linear-gradient(to right, ${stops.join(", ")})` };
  return el("span", { class: "legend-bar", "aria-hidden": "true", style });
}

/**
 * A colour as CSS.
 * @param {Colour} colour
 */
export function css([red, green, blue]) {
  return `rgb(${red} ${green} ${blue})`;
}

/**
 * A text colour that can be read on a background colour: black or white.
 * @param {Colour} background
 */
export function textOn([red, green, blue]) {
  const [r, g, b] = [red, green, blue].map((value) => {
    const part = value / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#000" : "#fff";
}

/**
 * The map and the range of numbers: diverging around zero if there are negative ones, else sequential from zero.
 * @param {Iterable<number | null>} values
 * @returns {Scale}
 */
export function scaleOf(values) {
  let [low, high] = [0, 0];
  for (const value of values) {
    if (value !== null && Number.isFinite(value)) {
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  const size = Math.max(-low, high) || 1;
  return low < 0 ? { map: "diverging", low: -size, high: size } : { map: "sequential", low: 0, high: size };
}

/**
 * The share of a value in a scale.
 * @param {number} value
 * @param {Scale} scale
 */
export function shareOf(value, { low, high }) {
  return (value - low) / (high - low);
}
