// Numbers and tokens as text.

/** @typedef {{ id?: number, text?: string | null }} Named a token: its text, or else its id */

const JOINERS = "\u200c\u200d"; // they shape the letters and emoji beside them

/**
 * A number with four significant digits. Null and non-finite numbers have names of their own.
 * @param {number | null | undefined} value
 */
export function number(value) {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : value < 0 ? "−∞" : "not a number";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const text =
    size >= 1e6 || size < 1e-4 ? value.toExponential(3) : size >= 1000 ? value.toFixed(1) : value.toPrecision(4);
  return text.replaceAll("-", "−");
}

/**
 * A number with its sign, for differences and shares.
 * @param {number} value
 */
export function signed(value) {
  return `${value > 0 ? "+" : ""}${number(value)}`;
}

/**
 * A text of at most so many characters.
 * @param {string} text
 * @param {number} most
 */
export function cut(text, most) {
  return text.length > most ? `${text.slice(0, Math.max(1, most - 1))}…` : text;
}

/**
 * A count with separators for thousands.
 * @param {number} value
 */
export function count(value) {
  return Math.round(value).toLocaleString("en");
}

/**
 * A probability in percent, from two significant digits up, with no-break spaces.
 * @param {number | null | undefined} probability
 */
export function percent(probability) {
  if (probability === null || probability === undefined) return "–";
  const value = 100 * probability;
  const text = value === 0 ? "0" : value < 0.01 ? "<\u00a00.01" : value >= 10 ? value.toFixed(1) : value.toFixed(2);
  return `${text}\u00a0%`; // a line does not end before the sign
}

/**
 * A number of bytes.
 * @param {number} value
 */
export function bytes(value) {
  if (value < 1e3) return `${value} B`;
  return value < 1e6
    ? `${(value / 1e3).toFixed(1)} kB`
    : value < 1e9
      ? `${(value / 1e6).toFixed(1)} MB`
      : `${(value / 1e9).toFixed(2)} GB`;
}

/**
 * The text of a token with its white space visible: "␣" for a space, "↵" for a new line.
 * @param {Named} token
 */
export function shown(token) {
  if (token.text === null || token.text === undefined) return `#${token.id}`;
  if (token.text === "") return "(empty)";
  return withCodePoints(token.text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll("\r", "␍")).replaceAll(
    " ",
    "␣",
  );
}

/**
 * A text in which characters without a shape, such as a no-break space, are written as code points: "U+00A0".
 * @param {string} text
 */
function withCodePoints(text) {
  const isAlone = [...text].length === 1;
  return text.replaceAll(/[\p{Cc}\p{Cf}\p{Co}\p{Z}]/gu, (character) => {
    if (character === " " || (!isAlone && JOINERS.includes(character))) return character;
    const name = `U+${(character.codePointAt(0) ?? 0).toString(16).toUpperCase().padStart(4, "0")}`;
    return isAlone ? name : `[${name}]`;
  });
}

/**
 * A token in a sentence: its text in quotation marks, or its id if it has no text.
 * @param {Named} token
 */
export function quoted(token) {
  return token.text === null || token.text === undefined
    ? `token ${token.id}`
    : `“${withCodePoints(token.text.replaceAll("\n", "↵")).replaceAll(" ", "\u00a0")}”`; // it stays on one line
}
