// Colour maps for numbers. Both can be told apart by people who are colour-blind, and in both the strongest colour means
// the largest size: near zero, a cell has nearly the colour of the page.

import { isDark } from "../theme.js";

const SEQUENTIAL = {
  light: [[247, 251, 255], [198, 219, 239], [107, 174, 214], [33, 113, 181], [8, 48, 107]],
  dark: [[20, 26, 34], [23, 60, 104], [35, 110, 170], [90, 170, 215], [222, 240, 252]],
};
const DIVERGING = {
  light: [[127, 59, 8], [224, 130, 20], [253, 208, 162], [247, 247, 247], [178, 190, 225], [84, 110, 180], [35, 40, 110]],
  dark: [[255, 205, 150], [230, 140, 50], [110, 65, 25], [24, 28, 36], [35, 60, 115], [85, 130, 215], [190, 215, 255]],
};

/** The colour [red, green, blue] of a share from 0 to 1 on a map: "sequential", or "diverging" (0.5 is zero). */
export function colour(share, map = "sequential") {
  const stops = (map === "diverging" ? DIVERGING : SEQUENTIAL)[isDark() ? "dark" : "light"];
  const place = Math.min(Math.max(share, 0), 1) * (stops.length - 1);
  const index = Math.min(Math.floor(place), stops.length - 2);
  return stops[index].map((value, channel) => Math.round(value + (place - index) * (stops[index + 1][channel] - value)));
}

/** A colour as CSS. */
export function css([red, green, blue]) {
  return `rgb(${red} ${green} ${blue})`;
}

/** A text colour that can be read on a background colour: black or white. */
export function textOn([red, green, blue]) {
  const [r, g, b] = [red, green, blue].map((value) => {
    const part = value / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#000" : "#fff";
}

/** The map and the range of numbers: diverging around zero if there are negative ones, else sequential from zero. */
export function scaleOf(values) {
  let [low, high] = [0, 0];
  for (const value of values) {
    if (Number.isFinite(value)) {
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  const size = Math.max(-low, high) || 1;
  return low < 0 ? { map: "diverging", low: -size, high: size } : { map: "sequential", low: 0, high: size };
}

/** The share of a value in a scale. */
export function shareOf(value, { low, high }) {
  return (value - low) / (high - low);
}
