// What the logit lens answers in words: from which layer on a token is the most likely one.

import { count, percent, quoted } from "../format.js";
import { placeName } from "../network/names.js";

/** @import { LensToken, Token } from "../answers.js" */

/**
 * The probability of a followed token. It is never 0: a 0 of the service is too small for its numbers.
 * @param {number | null} probability
 */
export function chance(probability) {
  return probability === 0 ? "<\u00a00.01\u00a0%" : percent(probability);
}

/**
 * The name of each residual that is decoded: before the first layer, then after each one.
 * @param {number} row
 * @param {number} numRows
 */
export function rowName(row, numRows) {
  if (row === 0) return `before ${placeName(0)}`;
  return `after ${placeName(row - 1)}${row === numRows - 1 ? " (output)" : ""}`;
}

/**
 * Where a token wins at a position. `track`: for each residual {rank, probability} of the token, the first one before
 * layer 0. A rank counts the tokens that are more likely, so 0 is the most likely one.
 * @param {Token} token
 * @param {number} position
 * @param {LensToken[]} track
 */
export function whereItWins(token, position, track) {
  const end = track.length - 1;
  if (track[end].rank > 0) return loses(token, position, track);
  let from = end;
  while (from > 0 && track[from - 1].rank === 0) from -= 1;
  const since =
    from === 0
      ? `It is the most likely token from the start: before ${placeName(0)}, and after every layer.`
      : from === end
        ? `It becomes the most likely token only after ${placeName(from - 1)}, the last layer.`
        : `It is the most likely token after ${placeName(from - 1)}, and after every later layer.`;
  const earlier = track.findIndex(({ rank }, row) => row < from && rank === 0);
  const hint =
    earlier === -1
      ? ""
      : ` It was also the most likely token ${rowName(earlier, track.length)}, but another token took its place ` +
        "after that.";
  return (
    `After position ${position}, the network predicts ${quoted(token)} (${chance(track[end].probability)}). ` +
    `${since}${hint}`
  );
}

/**
 * @param {Token} token
 * @param {number} position
 * @param {LensToken[]} track
 */
function loses(token, position, track) {
  const end = track.length - 1;
  const best = track.reduce((found, each, row) => (each.rank < track[found].rank ? row : found), 0);
  const top =
    track[best].rank === 0
      ? `It is the most likely token ${rowName(best, track.length)}`
      : `Its best rank is ${count(track[best].rank)}, ${rowName(best, track.length)}`;
  return (
    `After position ${position}, ${quoted(token)} is not the most likely token. After the last layer, it has rank ` +
    `${count(track[end].rank)} (${chance(track[end].probability)}); rank 0 is the most likely token. ${top} ` +
    `(${chance(track[best].probability)}).`
  );
}
