// Whether a text has the words that somebody typed into a search box.

const plain = (/** @type {string} */ text) =>
  text
    .toLowerCase()
    .replaceAll(/[-_.,:/\s]+/g, " ")
    .trim();

/**
 * Whether a text has all words of a query, in any order. Hyphens, underscores, dots and slashes count as spaces, and a
 * word also finds its singular. A word of one letter or of digits only must be a whole word of the text, so that "3"
 * does not find 13.
 * @param {string} text
 * @param {string} query
 */
export function isFound(text, query) {
  const said = plain(text);
  const words = new Set(said.split(" "));
  const has = (/** @type {string} */ word) => (/^(\d+|[a-z])$/.test(word) ? words.has(word) : said.includes(word));
  return plain(query)
    .split(" ")
    .filter(Boolean)
    .every((word) => has(word) || (word.length > 3 && word.endsWith("s") && has(word.slice(0, -1))));
}
