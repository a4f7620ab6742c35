// Colour maps for numbers. Both can be told apart by people who are colour-blind, and in both the strongest colour
// means the largest size: near zero, a cell has nearly the colour of the page.

import { isDark } from "../theme.js";

/**
 * @typedef {[red: number, green: number, blue: number]} Colour
 * @typedef {"sequential" | "diverging"} ColourMap
 * @typedef {{ map: ColourMap, low: number, high: number, ends?: string[] }} Scale `ends`: texts for the legend
 */

/** @type {Record<"light" | "dark", Colour[]>} */
const SEQUENTIAL = {
  light: [
    [247, 251, 255],
    [198, 219, 239],
    [107, 174, 214],
    [33, 113, 181],
    [8, 48, 107],
  ],
  dark: [
    [20, 26, 34],
    [23, 60, 104],
    [35, 110, 170],
    [90, 170, 215],
    [222, 240, 252],
  ],
};
/** @type {Record<"light" | "dark", Colour[]>} */
const DIVERGING = {
  light: [
    [170, 52, 4],
    [240, 124, 40],
    [254, 212, 170],
    [247, 248, 250],
    [184, 210, 238],
    [74, 140, 208],
    [16, 66, 132],
  ],
  dark: [
    [255, 206, 150],
    [238, 132, 46],
    [112, 62, 22],
    [22, 28, 37],
    [28, 66, 110],
    [66, 144, 220],
    [186, 222, 255],
  ],
};

/**
 * The colour of a share from 0 to 1 on a map: "sequential", or "diverging" (0.5 is zero).
 * @param {number} share
 * @param {ColourMap} map
 * @returns {Colour}
 */
export function colour(share, map = "sequential") {
  const stops = (map === "diverging" ? DIVERGING : SEQUENTIAL)[isDark() ? "dark" : "light"];
  const place = Math.min(Math.max(share, 0), 1) * (stops.length - 1);
  const index = Math.min(Math.floor(place), stops.length - 2);
  const between = (/** @type {number} */ value, /** @type {number} */ next) =>
    Math.round(value + (place - index) * (next - value));
  const [[red, green, blue], next] = [stops[index], stops[index + 1]];
  return [between(red, next[0]), between(green, next[1]), between(blue, next[2])];
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
